"""Samples as the columns that a run keeps of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fspo.trainer.rollout import Rollout, describe, rollout_of, with_advantages
from megatron_fspo.types import Sample


def as_rollout(samples: Sequence[Sample], per_prompt: int = 1) -> Rollout:
    """All on data-parallel rank 0; ``per_prompt`` samples to each prompt, one after the other."""
    table = [(*describe(s.completion, 0), s.reward, s.reward) for s in samples]
    rollout = rollout_of(
        [s.prompt for s in samples[::per_prompt]],
        per_prompt,
        torch.tensor(table, dtype=torch.float64),
        {number: s.completion for number, s in enumerate(samples)},
    )
    return with_advantages(rollout, torch.tensor([s.advantage for s in samples], dtype=torch.float64))
