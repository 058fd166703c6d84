"""Sends completions from the rank that received them to the ranks that need them, without pickle."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.groups import exchange
from megatron_fspo.types import Completion, VersionSpan


class _Sent(msgspec.Struct, array_like=True):
    """Message format of a :class:`~megatron_fspo.types.Completion`: spans and ranges are tuples."""

    token_ids: Any
    log_probs: Any
    written: list[tuple[int, int]]
    row_starts: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    weight_version: int
    version_spans: list[tuple[int, int, int]]
    reward: float | None
    failures: int
    environment_seconds: float
    routes: tuple[tuple[int, int, int], bytearray] | None
    route_problem: str


_ROWS = msgspec.msgpack.Decoder(list[_Sent])


def hand_out(shares: Sequence[Sequence[Completion]], *, group: dist.ProcessGroup) -> list[Completion]:
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
    rows = [
        _Sent(
            c.token_ids,
            c.log_probs,
            [(one.start, one.stop) for one in c.written],
            c.row_starts,
            c.finish_reason,
            c.weight_version,
            [(span.version, span.start, span.end) for span in c.version_spans],
            c.reward,
            c.failures,
            c.environment_seconds,
            c.routes if c.routes is None else (c.routes.shape, c.routes.numpy().reshape(-1).data),
            c.route_problem,
        )
        for c in completions
    ]
    buffer = bytearray()
    msgspec.msgpack.Encoder(enc_hook=array.tobytes).encode_into(rows, buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _decode(encoded: Tensor) -> list[Completion]:
    return [
        Completion(
            token_ids=array("i", row.token_ids),
            log_probs=array("f", row.log_probs),
            written=tuple(range(*pair) for pair in row.written),
            row_starts=row.row_starts,
            finish_reason=row.finish_reason,
            weight_version=row.weight_version,
            version_spans=tuple(VersionSpan(version=v, start=i, end=k) for v, i, k in row.version_spans),
            reward=row.reward,
            failures=row.failures,
            environment_seconds=row.environment_seconds,
            routes=row.routes and torch.frombuffer(row.routes[1], dtype=torch.uint8).view(row.routes[0]),
            route_problem=row.route_problem,
        )
        for row in (_ROWS.decode(encoded.numpy().data) if len(encoded) else [])
    ]
