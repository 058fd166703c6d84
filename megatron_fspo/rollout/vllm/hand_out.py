"""Completions from the rank that has them all to those that want them: as arrays, each once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.groups import exchange
from megatron_fspo.types import Completion, VersionSpan

_TABLE = 4
"""Numbers per completion: tokens, 1 if cut off, version of the weights, spans of versions."""
_SPAN = 3


def hand_out(parts: Sequence[Sequence[Completion]], *, group: dist.ProcessGroup) -> list[Completion]:
    """Give every rank of the group its completions. Collective.

    Args:
        parts: what goes to each rank; empty lists on a rank that has none. What stays is not copied.

    Returns:
        this rank's, in their order.
    """
    here = group.rank()
    sent = [[*part] if rank != here else [] for rank, part in enumerate(parts)]
    table, counts = exchange([_table(part) for part in sent], torch.long, group=group)
    spans, _ = exchange([_spans(part) for part in sent], torch.long, group=group)
    token_ids, _ = exchange([_rows(c.token_ids for c in part) for part in sent], torch.int32, group=group)
    log_probs, _ = exchange([_rows(c.log_probs for c in part) for part in sent], torch.float32, group=group)
    found = _completions(table, spans, token_ids, log_probs)
    before = sum(counts[:here]) // _TABLE
    return [*found[:before], *parts[here], *found[before:]]


def _table(completions: Sequence[Completion]) -> list[Tensor]:
    return [
        torch.tensor(
            [len(c.token_ids), c.finish_reason == "length", c.weight_version, len(c.version_spans)],
            dtype=torch.long,
        )
        for c in completions
    ]


def _spans(completions: Sequence[Completion]) -> list[Tensor]:
    spans = [(span.version, span.start, span.end) for c in completions for span in c.version_spans]
    return [torch.tensor(spans, dtype=torch.long).flatten()]


def _rows(arrays: Iterable[Sequence[float]]) -> list[Tensor]:
    """Views of the arrays; frombuffer refuses an empty one."""
    types = {"i": torch.int32, "f": torch.float32}
    return [
        torch.frombuffer(row, dtype=types[row.typecode]) for row in arrays if isinstance(row, array) and row
    ]


def _array(typecode: str, values: Tensor) -> Any:
    """A copy, as an ``array``."""
    found = array(typecode)
    found.frombytes(values.view(torch.uint8).numpy().data)
    return found


def _completions(table: Tensor, spans: Tensor, token_ids: Tensor, log_probs: Tensor) -> list[Completion]:
    rows = table.view(-1, _TABLE).tolist()
    lengths = [length for length, *_ in rows]
    spans_left = iter(spans.view(-1, _SPAN).tolist())
    return [
        Completion(
            token_ids=_array("i", ids),
            log_probs=_array("f", values),
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
