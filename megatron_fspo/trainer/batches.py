"""One rollout → mini-batches (optimizer steps) → this rank's packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.packing.batch import MicroBatch, collate, sample_length
from megatron_fspo.packing.plan import plan_micro_batches
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.types import Sample


def make_mini_batches(
    config: Config, samples: Sequence[Sample], groups: ParallelGroups, device: torch.device
) -> list[list[MicroBatch]]:
    """``[mini-batch][micro-batch]`` of this data-parallel rank.

    A mini-batch is a run of whole prompts. Every rank sees all samples and computes the same plan, so N and
    T are known without a collective and do not depend on how the batch is split.
    """
    per_batch = len(samples) // config.batch.mini_batches
    return [
        _micro_batches(config, samples, range(start, start + per_batch), groups, device)
        for start in range(0, len(samples), per_batch)
    ]


def _micro_batches(
    config: Config,
    samples: Sequence[Sample],
    indices: range,
    groups: ParallelGroups,
    device: torch.device,
) -> list[MicroBatch]:
    lengths = [len(samples[i].completion.token_ids) for i in indices]
    plan = plan_micro_batches(
        [sample_length(samples[i]) for i in indices],
        ranks=groups.dp.size(),
        max_tokens=config.batch.max_tokens,
    )
    return [
        collate(
            samples,
            [indices[i] for i in micro_batch],
            num_sequences=sum(length > 0 for length in lengths),
            num_tokens=sum(lengths),
            multiple_of=config.parallel.tensor if config.parallel.sequence else 1,
            device=device,
        )
        for micro_batch in plan[groups.dp.rank()]
    ]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far the sampler's log-probs are from the trainer's, over this rank's tokens."""

    total: float
    """Σ |Δ|."""
    largest: float
    tokens: int


def sampler_mismatch(
    micro_batches: Sequence[MicroBatch], scores: Sequence[Tensor], samples: Sequence[Sample]
) -> Mismatch:
    """Compare the sampled log-probs with the old pass, token by token (finite ones)."""
    total, largest, tokens = 0.0, 0.0, 0
    for batch, score in zip(micro_batches, scores, strict=True):
        sampled = [x for i in batch.sample_index.tolist() for x in samples[i].completion.log_probs]
        # The mask walks the pack in the same order: sequence after sequence, token after token.
        gap = (score[batch.mask].cpu() - torch.tensor(sampled)).abs()
        gap = gap[torch.isfinite(gap)]
        total += gap.sum().item()
        tokens += gap.numel()
        largest = max(largest, gap.max().item() if gap.numel() else 0.0)
    return Mismatch(total=total, largest=largest, tokens=tokens)
