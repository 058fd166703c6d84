"""The process groups of a run, handed down as an argument: nothing below asks for globals. Tensors and small
Python objects that change ranks. And metrics as (sum, denominator) pairs until the last reduction, so that no
split of a batch changes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.control import Control


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Built once, in :mod:`megatron_fspo.mcore.startup`, or by :meth:`of`."""

    tp: dist.ProcessGroup
    """Tensor parallel: ranks that share every token, each with a slice of the vocabulary."""
    pp: dist.ProcessGroup
    """Pipeline parallel."""
    cp: dist.ProcessGroup
    """Context parallel: ranks that share every sequence, each with some of its tokens."""
    ep: dist.ProcessGroup
    """Expert parallel: ranks of one pipeline stage, each with some of every layer's experts; runs across the
    other three."""
    edp: dist.ProcessGroup
    """Expert data parallel: the ranks of one pipeline stage that hold the same experts."""
    dp: dist.ProcessGroup
    """Data parallel: ranks with different sequences."""
    dp_cp: dist.ProcessGroup
    """Data and context parallel together: all ranks with different tokens."""
    control: Control = field(default_factory=Control)
    """Lets ranks wait for each other outside of collectives; the default waits for nobody."""

    def copies(self, *, of_expert: bool) -> dist.ProcessGroup:
        """Ranks with other tokens that hold the same values of a parameter: its gradient is their sum."""
        return self.edp if of_expert else self.dp_cp

    @property
    def first_of_copy(self) -> bool:
        """True on the rank of a model copy that holds its responses."""
        return self.tp.rank() == self.cp.rank() == self.pp.rank() == 0

    @classmethod
    def of(cls, parallel_state: Any, control: Control | None = None) -> ParallelGroups:
        """Take the groups that ``megatron.core.parallel_state.initialize_model_parallel`` has made."""
        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            ep=parallel_state.get_expert_model_parallel_group(),
            edp=parallel_state.get_expert_data_parallel_group(),
            dp=parallel_state.get_data_parallel_group(),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            control=control or Control(),
        )


def pack_layout(
    groups: ParallelGroups,
    device: torch.device,
    *,
    sequence: bool = False,
    interleaved: bool = False,
    align: int = 1,
) -> PackLayout:
    """Return the layout that this rank's packs must fit, whatever they may hold.

    Args:
        groups: of the job's layout.
        device: where packs are wanted.
        sequence: sequence parallel: tensor-parallel ranks share the tokens of a pack.
        interleaved: the pipeline's schedule is, with several chunks of the model on a rank.
        align: what the rows of every product must be a multiple of.
    """
    return PackLayout(
        data_rank=groups.dp.rank(),
        data_size=groups.dp.size(),
        context_rank=groups.cp.rank(),
        context_size=groups.cp.size(),
        multiple_of=align * (groups.tp.size() if sequence else 1),
        # What the interleaved schedule asks for.
        count_multiple_of=groups.pp.size() if interleaved else 1,
        device=device,
    )


def of_first_rank(values: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """A tensor of one shape on all ranks becomes that of one of them: the one that is first in every group.

    For whatever decides control flow, shapes or collectives. Ranks that share a model compute the same
    numbers, but not always to the last bit: sums come in another order, and processors of another type round
    a power otherwise. Two that differ in a comparison would meet in collectives of different shapes.

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


def exchange(
    rows: Sequence[Sequence[Tensor]], dtype: torch.dtype, *, group: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Give every rank of the group its share, straight from who has it, without pickles. Collective: one
    all-to-all, and one of the sizes before it.

    Copies what is sent once, and what is received not at all.

    Args:
        rows: for each rank of the group what goes to it: rows of one dimension and any lengths.
        dtype: of the rows.
        group: whose ranks exchange.

    Returns:
        all that this rank was given, one rank's after the other's, on the CPU; and how much from each.
    """
    together = torch.cat([torch.zeros(0, dtype=dtype), *(row for some in rows for row in some)])
    if group.size() == 1:
        return together, [len(together)]
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    sizes = torch.tensor([sum(len(row) for row in some) for some in rows], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    counts = coming.tolist()
    together = together.to(device)
    received = together.new_empty(sum(counts))
    dist.all_to_all_single(received, together, counts, sizes.tolist(), group=group)
    return received.cpu(), counts


T = TypeVar("T")

Totals = dict[str, tuple[float, float]]
"""Name → (sum, denominator)."""


def sum_metrics(parts: Iterable[Mapping[str, Tensor]], *, group: dist.ProcessGroup) -> Totals:
    """Sum the pairs [sum, denominator] of several micro-batches, by name, over the group, data × context
    parallel, in one all-reduce. Raises ``KeyError`` where the names of two parts differ; they must not
    between ranks."""
    pairs: dict[str, Tensor] = {}
    for part in parts:
        if pairs and part.keys() != pairs.keys():
            raise KeyError(f"micro-batches report different metrics: {sorted(part.keys() ^ pairs.keys())}")
        pairs = {name: pairs[name] + pair if pairs else pair for name, pair in part.items()}
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
    """All ranks' lists, one after the other in rank order, on every rank."""
    if group.size() == 1:
        return items
    parts: list[list[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(parts, items, group=group)
    return [item for part in parts for item in part]


def share(item: T, *, group: dist.ProcessGroup, source: int = 0) -> T:
    """One rank's object, on every rank of the group; ``source`` counts within the group, -1 is its last."""
    if group.size() == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[source], group=group)
    return box[0]


def any_rank(flag: bool, *, device: torch.device) -> bool:
    """Return True if the flag is set on any rank of the job. Collective."""
    flags = torch.full((), int(flag), device=device)  # no copy from the host, which would be waited for
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def agreed(item: T, groups: ParallelGroups) -> T:
    """A small Python object of the job's first rank, on every rank of the job. Collective."""
    for group in (groups.dp_cp, groups.tp, groups.pp):
        item = share(item, group=group)
    return item
