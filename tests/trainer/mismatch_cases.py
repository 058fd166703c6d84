"""Rollouts whose Δ is given, packed any way; records of responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.trainer.rollout import Rollout, describe, make_rollout, with_advantages
from megatron_fspo.types import Completion, Prompt, Sample
from packs import make_micro_batches

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
LENGTHS = [1, 9, 30, 0, 4]
PACKS = [[[0, 1, 2, 3, 4]], [[4, 2], [3, 0], [1]], [[2], [1], [0], [4], [3]]]


def sample(index: int, log_probs: Sequence[float], **changed: Any) -> Sample:
    """A response to a prompt of one to three tokens."""
    prompt = Prompt(index=index, token_ids=(1, 2, 3)[: 1 + index % 3], text="", answer="")
    usual = {"token_ids": (5,) * len(log_probs), "finish_reason": "length", "weight_version": 0}
    return Sample(
        prompt=prompt,
        number=0,
        completion=Completion(log_probs=tuple(log_probs), **{**usual, **changed}),
        reward=0.0,
        advantage=(-1.0) ** index,
    )


def record(length: int, s: float, advantage: float, **flags: Any) -> SequenceRecord:
    """Of a response with this S, not clipped unless ``flags`` say so."""
    values: dict[str, Any] = dict.fromkeys(("clipped_low", "clipped_high", "dual_clipped"), 0.0)
    values |= {"sample": 0, "rank": 0, "update": 1, "out_of_band": False, "nonfinite": False}
    return SequenceRecord(**values | flags, length=length, log_ratio_sum=s, advantage=advantage)


def responses(scale: float = 0.1, shift: float = 0.0) -> tuple[list[Sample], list[torch.Tensor]]:
    """Samples, and per response the Δ of its tokens."""
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(n, generator=generator, dtype=torch.float64) * scale + shift for n in LENGTHS]
    return [sample(i, [-1.5] * n) for i, n in enumerate(LENGTHS)], deltas


def as_rollout(samples: Sequence[Sample], per_prompt: int = 1) -> Rollout:
    """All on data-parallel rank 0; ``per_prompt`` samples to each prompt, one after the other."""
    table = [describe(s.completion, 0, s.reward, s.reward) for s in samples]
    rollout = make_rollout(
        [s.prompt for s in samples[::per_prompt]],
        per_prompt,
        torch.tensor(table, dtype=torch.float64),
        {number: s.completion for number, s in enumerate(samples)},
    )
    return with_advantages(rollout, torch.tensor([s.advantage for s in samples], dtype=torch.float64))


def packed(
    samples: Sequence[Sample], deltas: Sequence[torch.Tensor], packs: Sequence[Sequence[int]]
) -> MicroBatches:
    """Micro-batches with the trainer's log-probs: Δ above the sampler's; NaN outside the mask."""
    batches = make_micro_batches(samples, packs)
    scores = []
    for batch in batches:
        score = torch.full(batch.loss_mask.shape, math.nan, dtype=torch.float64)
        for number, index in enumerate(batch.sample_index.tolist()):
            here = batch.loss_mask & (batch.segment == number)
            score[here] = batch.sampled_log_probs[here] + deltas[index]
        scores.append(score)
    return batches.with_columns(old_log_probs=scores)
