"""Chance in a dump: an S that no learning is in."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.objective.calibration import sigma_hat

Source = Literal["sampler", "signs", "normal"]
_LEAST = 100_000
"""Responses, or tokens where they are known, to draw at random, at least."""
_MOST_TIMES = 20


def noise_alone(dump: Dump) -> tuple[Dump, Source]:
    """Return the responses, each as often as any other, with S of noise, and where that comes from.

    sampler: S = Σ_t (log π_old − log π_sampler), of two policies that should agree: as measured.
    signs: each token's log-ratio with a sign at random: the same sizes, without a direction.
    normal: S = σ̂·√L·Z where tokens are not known. σ̂ is the robust spread of S itself.

    The last two are what is left if *all* of S were chance: they bound the noise and do not measure it.
    """
    if dump.sampler_gap is not None:
        gap = dump.sampler_gap
        assert dump.old_log_probs is not None
        sampled = dump.old_log_probs - gap
        sums = _totals(gap, dump.lengths)
        return replace(dump, log_ratio=gap, old_log_probs=sampled, log_ratio_sum=sums), "sampler"
    generator = torch.Generator().manual_seed(0)
    tokens = dump.log_ratio
    times = max(1, min(_MOST_TIMES, _LEAST // len(dump.lengths if tokens is None else tokens)))
    names = ("rows", "lengths", "advantages")
    many = replace(dump, **{name: getattr(dump, name).repeat(times) for name in names})
    lengths = many.lengths
    if tokens is None:
        z = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        spread = sigma_hat(dump.log_ratio_sum, dump.lengths) * lengths.double().sqrt()
        return replace(many, log_ratio_sum=spread * z), "normal"
    assert dump.old_log_probs is not None
    sizes, old = tokens.repeat(times), dump.old_log_probs.repeat(times)
    moved = sizes * (2.0 * torch.randint(2, sizes.shape, generator=generator) - 1.0)
    return replace(many, log_ratio=moved, old_log_probs=old, log_ratio_sum=_totals(moved, lengths)), "signs"


def _totals(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return [N] sums over the tokens [T] of each response."""
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    return tokens.new_zeros(len(lengths)).index_add_(0, owner, tokens)
