"""One rank decides, and the others take its word: for whatever decides control flow, shapes or collectives.

Ranks that share a model compute the same numbers, but not always to the last bit: sums come in another order,
and processors of another type round a power otherwise. Two that differ in a comparison would go separate
ways, and meet in collectives of different shapes.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import share

T = TypeVar("T")


def of_first_rank(values: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """A tensor of one shape on all ranks becomes that of one of them: the one that is first in every group.

    One broadcast over each group with more than one rank. Without any, the tensor itself; else a copy. No
    gradient passes through.
    """
    several = [group for group in groups if group.size() > 1]
    if not several:
        return values
    values = values.detach().clone(memory_format=torch.contiguous_format)
    for group in several:
        dist.broadcast(values, src=dist.get_process_group_ranks(group)[0], group=group)
    return values


def agreed(item: T, groups: ParallelGroups) -> T:
    """A small Python object of the job's first rank, on every rank of the job. Collective."""
    for group in (groups.dp_cp, groups.tp, groups.pp):
        item = share(item, group=group)
    return item
