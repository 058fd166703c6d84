"""Completions from the rank that has them all to those that want them: each once, and without pickles."""

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

_Pair = tuple[int, int]
_Triple = tuple[int, int, int]
_ROWS = msgspec.msgpack.Decoder(
    list[
        tuple[
            bytes,
            bytes,
            list[_Pair],
            Literal["stop", "length"],
            int,
            list[_Triple],
            float | None,
            int,
            tuple[_Triple, bytearray] | None,
            str,
        ]
    ]
)


def hand_out(shares: Sequence[Sequence[Completion]], *, group: dist.ProcessGroup) -> list[Completion]:
    """Give every data-parallel rank its share of what some of them hold: ``shares`` are for each rank, empty
    lists where there are none. What stays is not copied. Returns this rank's, in their order. Collective."""
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
    rows: list[tuple[Any, ...]] = []
    for c in completions:
        spans = [(span.version, span.start, span.end) for span in c.version_spans]
        routes = None if c.routes is None else (c.routes.shape, c.routes.numpy().reshape(-1).data)
        written = [(one.start, one.stop) for one in c.written]
        rows.append(
            (
                c.token_ids,
                c.log_probs,
                written,
                c.finish_reason,
                c.weight_version,
                spans,
                c.reward,
                c.failures,
                routes,
                c.route_problem,
            )
        )
    buffer = bytearray()
    msgspec.msgpack.Encoder(enc_hook=array.tobytes).encode_into(rows, buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _decode(encoded: Tensor) -> list[Completion]:
    return [
        Completion(
            token_ids=array("i", ids),
            log_probs=array("f", log_probs),
            written=tuple(range(*pair) for pair in written),
            finish_reason=reason,
            weight_version=version,
            version_spans=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in spans),
            reward=reward,
            failures=failures,
            routes=routes and torch.frombuffer(routes[1], dtype=torch.uint8).view(routes[0]),
            route_problem=problem,
        )
        for ids, log_probs, written, reason, version, spans, reward, failures, routes, problem in (
            _ROWS.decode(encoded.numpy().data) if len(encoded) else []
        )
    ]
