"""Process groups of a job, passed as an argument instead of globals; exchange of tensors and small objects.

Metrics are (sum, denominator) pairs until the last reduction, so they do not depend on how a batch is split.
"""

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
    """Process groups of this rank. Built once, in :mod:`megatron_fspo.mcore.machine.startup`, or by
    :meth:`of`."""

    tp: dist.ProcessGroup
    """Tensor parallel: ranks with the same tokens, each with slices of the matrices and the vocabulary."""
    pp: dist.ProcessGroup
    """Pipeline parallel: ranks with different layers."""
    cp: dist.ProcessGroup
    """Context parallel: ranks with the same sequences, each with some of their tokens."""
    ep: dist.ProcessGroup
    """Expert parallel: ranks of one stage, over tp, cp and dp, each with some of every layer's experts."""
    edp: dist.ProcessGroup
    """Expert data parallel: the ranks of one pipeline stage that hold the same experts."""
    dp: dist.ProcessGroup
    """Data parallel: ranks with different sequences."""
    dp_cp: dist.ProcessGroup
    """Data and context parallel together: ranks with different tokens."""
    control: Control = field(default_factory=Control)
    """Lets ranks wait for each other outside of collectives; the default never waits."""

    def copies(self, *, expert: bool) -> dist.ProcessGroup:
        """Return ranks that hold the same parameter, with different tokens: their gradients are summed."""
        return self.edp if expert else self.dp_cp

    @property
    def is_replica_leader(self) -> bool:
        """True on the first rank of a model replica, which holds the copy's responses."""
        return self.tp.rank() == self.cp.rank() == self.pp.rank() == 0

    @classmethod
    def of(cls, parallel_state: Any, control: Control | None = None) -> ParallelGroups:
        """Return the groups that ``megatron.core.parallel_state.initialize_model_parallel`` made."""
        cp = parallel_state.get_context_parallel_group()
        dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            cp=cp,
            ep=parallel_state.get_expert_model_parallel_group(),
            edp=parallel_state.get_expert_data_parallel_group(),
            # Two groups of the same ranks would be two communicators, a GiB of each GPU.
            dp=parallel_state.get_data_parallel_group() if cp.size() > 1 else dp_cp,
            dp_cp=dp_cp,
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
    """Return the layout of this rank's packs, without ``max_tokens``. ``sequence``: sequence parallelism is
    on; ``interleaved``: the pipeline has several model chunks per rank; ``align``: divisor of the number of
    tokens on a rank."""
    return PackLayout(
        data_rank=groups.dp.rank(),
        data_size=groups.dp.size(),
        context_rank=groups.cp.rank(),
        context_size=groups.cp.size(),
        multiple_of=align * (groups.tp.size() if sequence else 1),
        # Required by the interleaved schedule.
        count_multiple_of=groups.pp.size() if interleaved else 1,
        device=device,
    )


def broadcast_first(values: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """Return the tensor of the rank that is first in every group; shapes must agree.

    Use it for all values that decide control flow, shapes or collectives. Ranks of one model compute the same
    numbers, but not bit for bit: the order of sums and the rounding of powers may differ. If a comparison had
    different results on two ranks, their collectives would have different shapes.

    Collective: one broadcast per group with more than one rank. Without such groups it returns ``values``,
    otherwise a detached copy.
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
    """Send ``rows``, one-dimensional and of any lengths, to each rank of the group, without pickling.

    Returns the received elements on the CPU, concatenated in rank order, and their number from each rank.
    Collective: one all-to-all of the sizes, one of the data.
    """
    together = torch.cat([torch.zeros(0, dtype=dtype), *(row for part in rows for row in part)])
    if group.size() == 1:
        return together, [len(together)]
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    sizes = torch.tensor([sum(len(row) for row in part) for part in rows], device=device)
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
    """Sum the pairs [sum, denominator] of several micro-batches by name, over data × context parallel ranks.
    One all-reduce. Raises ``KeyError`` if micro-batches have different names; ranks must have the same."""
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
    """Sum the pairs of several passes by name; a name may be missing in some."""
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
    """Return the concatenation of all ranks' lists, in rank order, on every rank. Collective."""
    if group.size() == 1:
        return items
    parts: list[list[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(parts, items, group=group)
    return [item for part in parts for item in part]


def share(item: T, *, group: dist.ProcessGroup, source: int = 0) -> T:
    """Return the object of rank ``source`` of the group (-1 is its last) on every rank. Collective."""
    if group.size() == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[source], group=group)
    return box[0]


def any_rank(flag: bool, *, device: torch.device) -> bool:
    """Return True if the flag is set on any rank of the job. Collective."""
    flags = torch.full((), int(flag), device=device)  # a copy from the host would synchronize
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def agreed(item: T, groups: ParallelGroups) -> T:
    """Return a small Python object of the job's first rank on every rank of the job. Collective."""
    for group in (groups.dp_cp, groups.tp, groups.pp):
        item = share(item, group=group)
    return item
