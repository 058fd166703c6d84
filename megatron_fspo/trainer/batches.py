"""One rollout → mini-batches (optimizer steps) → this rank's packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fspo.config import Config
from megatron_fspo.packing.batch import MicroBatch, collate, sample_length
from megatron_fspo.packing.plan import attention_costs, plan_micro_batches
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.types import Sample
from megatron_fspo.weights import Architecture


def make_mini_batches(
    config: Config,
    arch: Architecture,
    samples: Sequence[Sample],
    groups: ParallelGroups,
    device: torch.device,
) -> list[list[MicroBatch]]:
    """``[mini-batch][micro-batch]`` of this data-parallel rank.

    A mini-batch is a run of whole prompts. Every rank sees all samples and computes the same plan, so N and
    T are known without a collective and do not depend on how the batch is split.
    """
    per_batch = len(samples) // config.batch.mini_batches
    return [
        _micro_batches(config, arch, samples, range(start, start + per_batch), groups, device)
        for start in range(0, len(samples), per_batch)
    ]


def _micro_batches(
    config: Config,
    arch: Architecture,
    samples: Sequence[Sample],
    indices: range,
    groups: ParallelGroups,
    device: torch.device,
) -> list[MicroBatch]:
    lengths = [len(samples[i].completion.token_ids) for i in indices]
    parallel = config.parallel
    tokens = [sample_length(samples[i], context=parallel.context) for i in indices]
    costs = None
    if config.batch.balance == "attention":
        costs = attention_costs(tokens, linear_size=arch.layer_size, attention_size=arch.q_size)
    plan = plan_micro_batches(
        tokens,
        ranks=groups.dp.size(),
        max_tokens=config.batch.max_tokens,
        costs=costs,
        count_multiple_of=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
    )
    return [
        collate(
            samples,
            [indices[i] for i in micro_batch],
            num_sequences=sum(length > 0 for length in lengths),
            num_tokens=sum(lengths),
            context_rank=groups.cp.rank(),
            context_size=parallel.context,
            multiple_of=parallel.tensor if parallel.sequence else 1,
            device=device,
        )
        for micro_batch in plan[groups.dp.rank()]
    ]
