"""Corrections for a sampler that is not quite the trainer's policy, kept apart from the clip band.

Δ_t = log π_trainer(y_t) − log π_sampler(y_t), both at the sampling temperature, with the trainer's weights
before this rollout's first update. exp(Δ) is the importance weight from the policy that sampled to the policy
that updates start from; the band then watches how far updates move on from there.

All clipping is in log space, before exp: ΣΔ = +800 under a cap gives the cap, not infinity. What is not
finite gets weight 0, never NaN; whether its sequence is reported as dropped is the trainer's business.

Shapes: N rows, sequences or tokens. Units: Δ and its sums in nats.
Source: truncated importance sampling is common in this field, as is a constant limit on the weight of a
sequence. ``length_fair_gate`` is ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_fspo.objective.band import require_positive


def truncated_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """min(exp(x), cap) [N] of x = Δ_t (``token_tis``) or Σ_t Δ_t (``sequence_tis``); 0 where x is not finite.

    ``log_ratio`` is x [N] in nats. Raises ``ValueError`` unless cap is above 0.
    """
    require_positive("cap", cap)
    return torch.where(log_ratio.isfinite(), log_ratio.clamp(max=math.log(cap)).exp(), 0.0)


def masked_weight(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """exp(x) [N] of x = Δ_t where low <= exp(x) <= high, else 0 (``icepop``, arXiv 2510.18855).

    Raises ``ValueError`` as ``within_ratio`` does.
    """
    return torch.where(within_ratio(log_ratio, low, high), log_ratio, -math.inf).exp()


def within_ratio(log_ratio_sums: Tensor, low: float, high: float) -> Tensor:
    """bool [N]: low <= exp(Σ_t Δ_t) <= high. False where the sum is not finite.

    One limit for every length: independent noise makes the sum spread as √L, so it rejects long responses.
    Raises ``ValueError`` unless 0 < low <= high.
    """
    require_positive("low", low)
    require_positive("high", high)
    if low > high:
        raise ValueError(f"low must not be above high, got {low} and {high}")
    return (log_ratio_sums >= math.log(low)) & (log_ratio_sums <= math.log(high))


def length_fair_gate(log_ratio_sums: Tensor, lengths: Tensor, c: float) -> Tensor:
    """bool [N]: |Σ_t Δ_t| <= c·√L. False where the sum is not finite.

    Independent noise with a deviation of σ per token gives the sum the deviation σ·√L: the gate rejects the
    share P(|Z| > c/σ) at every length. A constant limit on the sum rejects the long ones, a constant limit on
    the mean ΣΔ/L the short ones. With c of three to four σ, in nats per √token, sound responses stay.
    Raises ``ValueError`` unless c is above 0. Source: ours, FSPO's argument applied to the sampler's noise.
    """
    require_positive("c", c)
    return log_ratio_sums.isfinite() & (log_ratio_sums.abs() <= c * lengths.to(log_ratio_sums.dtype).sqrt())
