"""Hugging Face weights into and out of a running model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.policy import Policy
from megatron_fspo.weights import HFReader, check_coverage, iterate_hf_tensors, load_into, write_hf_checkpoint


def load_hf(policy: Policy, checkpoint: Path) -> None:
    """Copy a checkpoint into the policy; each rank reads its slices only."""
    groups = policy.groups
    with HFReader(checkpoint) as reader:
        loaded = load_into(
            policy.model.named_parameters(),
            reader,
            policy.arch,
            tp_rank=groups.tp.rank(),
            tp_size=groups.tp.size(),
            padded_vocab=policy.padded_vocab,
        )
    check_coverage(loaded, policy.arch)
    policy.weights_loaded()


def export_hf(policy: Policy, out: Path, *, source: Path) -> None:
    """Write the policy as a Hugging Face checkpoint; config and tokenizer come from ``source``.

    Collective: every rank calls it; rank 0 writes, one tensor in memory at a time, and appears at ``out``
    only when complete.
    """
    groups = policy.groups
    writer = dist.get_rank() == 0
    tp_ranks = dist.get_process_group_ranks(groups.tp)

    def gather(shard: Tensor) -> list[Tensor] | None:
        shard = shard.contiguous()
        if groups.tp.size() == 1:
            return [shard.cpu()] if writer else None
        parts = [torch.empty_like(shard) for _ in tp_ranks] if dist.get_rank() == tp_ranks[0] else None
        dist.gather(shard, parts, dst=tp_ranks[0], group=groups.tp)
        return [part.cpu() for part in parts] if writer and parts is not None else None

    tensors = iterate_hf_tensors(policy.model.named_parameters(), policy.arch, gather)
    if writer:
        write_hf_checkpoint(out, tensors, source)
    else:
        for _ in tensors:
            pass
    dist.barrier()
