"""Sends completions from the rank that received them to the ranks that need them, without pickle."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.groups import exchange
from megatron_fspo.types import Completion, VersionSpan

_FIELDS = tuple(field.name for field in fields(Completion))
_TENSOR = 1
"""Code of msgpack's extension for tensors; those of arrays are their type codes."""


def scatter_completions(
    shares: Sequence[Sequence[Completion]], *, group: dist.ProcessGroup
) -> list[Completion]:
    """Exchange completions between data-parallel ranks. ``shares``: this rank's completions for each rank,
    possibly none; its own are not copied. Return those for this rank, in order. Collective."""
    here = group.rank()
    sent = [[_encode(share)] if share and rank != here else [] for rank, share in enumerate(shares)]
    received, counts = exchange(sent, torch.uint8, group=group)
    pieces = torch.split(received, counts)
    return [
        completion
        for rank, piece in enumerate(pieces)
        for completion in (shares[here] if rank == here else _decode(piece))
    ]


def _encode(completions: Sequence[Completion]) -> Tensor:
    buffer = bytearray()
    rows = [[getattr(completion, name) for name in _FIELDS] for completion in completions]
    msgspec.msgpack.Encoder(enc_hook=_extension).encode_into(rows, buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _extension(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(ord(value.typecode), value.tobytes())
    return msgspec.msgpack.Ext(_TENSOR, array("q", value.shape).tobytes() + value.numpy().tobytes())


def _decode(encoded: Tensor) -> list[Completion]:
    rows = _DECODER.decode(encoded.numpy().data) if len(encoded) else []
    completions = []
    for row in rows:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in zip(_FIELDS, row, strict=True)
        }
        values["version_spans"] = tuple(VersionSpan(**span) for span in values["version_spans"])
        completions.append(Completion(**values))
    return completions


def _value(code: int, data: memoryview) -> Any:
    if code == _TENSOR:  # of routes, in three dimensions
        shape = tuple(array("q", bytes(data[:24])))
        dtype = torch.uint8 if len(data) - 24 == math.prod(shape) else torch.int16
        return torch.frombuffer(bytearray(data[24:]), dtype=dtype).view(shape)
    return array(chr(code), bytes(data))


_DECODER = msgspec.msgpack.Decoder(ext_hook=_value)
