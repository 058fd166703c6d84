"""Completions from the rank that has them all to those that want them: as arrays, each once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.exchange import exchange
from megatron_fspo.types import Completion, VersionSpan

_TABLE = 4
"""Numbers per completion: tokens, 1 if cut off, version of the weights, spans of versions."""
_SPAN = 3


def hand_out(parts: Sequence[Sequence[Completion]], *, group: dist.ProcessGroup) -> list[Completion]:
    """Give every rank of the group its completions. Collective.

    Args:
        parts: what goes to each rank; empty lists on a rank that has none.

    Returns:
        this rank's, in their order.
    """
    columns = [_columns(part) for part in parts]
    found = [torch.cat(exchange([column[number] for column in columns], group=group)) for number in range(4)]
    return _completions(*found)


def _columns(completions: Sequence[Completion]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = [
        (len(c.token_ids), c.finish_reason == "length", c.weight_version, len(c.version_spans))
        for c in completions
    ]
    spans = [(span.version, span.start, span.end) for c in completions for span in c.version_spans]
    return (
        torch.tensor(table, dtype=torch.long).flatten(),
        torch.tensor(spans, dtype=torch.long).flatten(),
        _flat([c.token_ids for c in completions], torch.int32),
        _flat([c.log_probs for c in completions], torch.float32),
    )


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    # frombuffer refuses an empty array
    return torch.cat([torch.zeros(0, dtype=dtype), *(torch.frombuffer(r, dtype=dtype) for r in rows if r)])


def _completions(table: Tensor, spans: Tensor, token_ids: Tensor, log_probs: Tensor) -> list[Completion]:
    rows = table.view(-1, _TABLE).tolist()
    lengths = [length for length, *_ in rows]
    spans_left = iter(spans.view(-1, _SPAN).tolist())
    return [
        Completion(
            token_ids=array("i", ids.numpy().tobytes()),
            log_probs=array("f", values.numpy().tobytes()),
            finish_reason="length" if cut else "stop",
            weight_version=version,
            version_spans=tuple(
                VersionSpan(version=v, start=start, end=end)
                for v, start, end in (next(spans_left) for _ in range(count))
            ),
        )
        for (_, cut, version, count), ids, values in zip(
            rows, token_ids.split(lengths), log_probs.split(lengths), strict=True
        )
    ]
