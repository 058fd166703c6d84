"""Metrics as (sum, denominator) pairs until the last reduction, so that no split of a batch changes them;
and small Python objects between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.groups import ParallelGroups

T = TypeVar("T")

Totals = dict[str, tuple[float, float]]
"""Name → (sum, denominator)."""


def add_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sum the pairs of several micro-batches.

    Args:
        parts: name → [sum, denominator]; every part has the same names.

    Raises:
        KeyError: the names differ.
    """
    total: dict[str, Tensor] = {}
    for part in parts:
        if total and part.keys() != total.keys():
            raise KeyError(f"micro-batches report different metrics: {sorted(part.keys() ^ total.keys())}")
        total = {name: total[name] + pair if total else pair.clone() for name, pair in part.items()}
    return total


def sum_metrics(pairs: Mapping[str, Tensor], *, group: dist.ProcessGroup) -> Totals:
    """Sum the pairs over the group in one all-reduce.

    Args:
        pairs: name → [sum, denominator]; the same names on every rank.
        group: data × context parallel.
    """
    names = sorted(pairs)
    table = torch.stack([pairs[name].double() for name in names])
    if group.size() > 1:
        dist.all_reduce(table, group=group)
    return {name: (total, count) for name, (total, count) in zip(names, table.tolist(), strict=True)}


def pool(parts: Iterable[Totals]) -> Totals:
    """Sum the pairs of several passes; a name need not be in all of them."""
    pooled: Totals = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = pooled.get(name, (0.0, 0.0))
            pooled[name] = (before[0] + total, before[1] + count)
    return pooled


def means(totals: Totals) -> dict[str, float]:
    """Name → sum / denominator; NaN where the denominator is 0."""
    return {name: total / count if count else float("nan") for name, (total, count) in totals.items()}


def gather_lists(items: list[T], *, group: dist.ProcessGroup) -> list[T]:
    """Return all ranks' lists, one after the other in rank order, on every rank."""
    if group.size() == 1:
        return items
    parts: list[list[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(parts, items, group=group)
    return [item for part in parts for item in part]


def share(item: T, *, group: dist.ProcessGroup, source: int = 0) -> T:
    """Return one rank's object, on every rank; ``source`` counts within the group, -1 is its last."""
    if group.size() == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[source], group=group)
    return box[0]


def any_rank(flag: bool, *, device: torch.device) -> bool:
    """Return True if the flag is set on any rank of the job. Collective."""
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def agreed(item: T, groups: ParallelGroups) -> T:
    """A small Python object of the job's first rank, on every rank of the job. Collective."""
    for group in (groups.dp_cp, groups.tp, groups.pp):
        item = share(item, group=group)
    return item
