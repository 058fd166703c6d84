"""The process groups of a run, handed down as an argument; nothing below asks for globals."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_fspo.config import Parallel
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.control import Control


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Built once, in :mod:`megatron_fspo.mcore.startup`."""

    tp: dist.ProcessGroup
    """Tensor parallel: ranks that share every token, each with a slice of the vocabulary."""
    pp: dist.ProcessGroup
    """Pipeline parallel."""
    cp: dist.ProcessGroup
    """Context parallel: ranks that share every sequence, each with some of its tokens."""
    ep: dist.ProcessGroup
    """Expert parallel: ranks of one pipeline stage, each with some of every layer's experts; runs across the
    other three."""
    dp: dist.ProcessGroup
    """Data parallel: ranks with different sequences."""
    dp_cp: dist.ProcessGroup
    """Data and context parallel together: all ranks with different tokens."""
    control: Control = field(default_factory=Control)
    """Where ranks wait for each other outside of collectives; the default is for a job of one process."""


def pack_layout(
    groups: ParallelGroups, parallel: Parallel, device: torch.device, *, align: int = 1
) -> PackLayout:
    """What this rank's packs must fit, whatever they may hold.

    Args:
        align: what the rows of every product must be a multiple of.
    """
    return PackLayout(
        data_rank=groups.dp.rank(),
        data_size=groups.dp.size(),
        context_rank=groups.cp.rank(),
        context_size=parallel.context,
        multiple_of=align * (parallel.tensor if parallel.sequence else 1),
        # What the interleaved schedule asks for.
        count_multiple_of=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        device=device,
    )
