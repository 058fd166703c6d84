"""Corrections for a sampler that differs from the trainer's policy. They are independent of the clip band.

Δ_t = log π_trainer(y_t) − log π_sampler(y_t), both at the sampling temperature, with the trainer's weights
before the first update on this rollout. exp(Δ) is the importance weight from the policy that sampled to the
policy that updates start from; the band limits how far updates then move.

Clipping is done in log space, so ΣΔ = 800 under a cap gives the cap, not infinity. Non-finite values get
weight 0, never NaN; the trainer decides whether to report their sequences as dropped.

Shapes: N sequences or tokens. Units: Δ and its sums in nats.
Source: truncated importance sampling and constant limits on a sequence's weight are common in the field;
``length_fair_gate`` is ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_fspo.objective.band import require_positive


def truncated_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """Return min(exp(x), cap) [N] for x = Δ_t (``token_tis``) or Σ_t Δ_t (``sequence_tis``), in nats; 0 where
    x is not finite. Raises ``ValueError`` unless cap is above 0."""
    require_positive("cap", cap)
    return torch.where(log_ratio.isfinite(), log_ratio.clamp(max=math.log(cap)).exp(), 0.0)


def masked_weight(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Return exp(x) [N] for x = Δ_t where low <= exp(x) <= high, else 0 (``icepop``, arXiv 2510.18855).
    Raises ``ValueError`` unless 0 < low <= high.
    """
    return torch.where(within_ratio(log_ratio, low, high), log_ratio, -math.inf).exp()


def within_ratio(log_ratio_sums: Tensor, low: float, high: float) -> Tensor:
    """Return bool [N]: low <= exp(Σ_t Δ_t) <= high, False where the sum is not finite.

    Independent noise spreads the sum by √L, so these limits reject long responses more often.
    Raises ``ValueError`` unless 0 < low <= high.
    """
    require_positive("low", low)
    require_positive("high", high)
    if low > high:
        raise ValueError(f"low must not be above high, got {low} and {high}")
    return (log_ratio_sums >= math.log(low)) & (log_ratio_sums <= math.log(high))


def length_fair_gate(log_ratio_sums: Tensor, lengths: Tensor, c: float) -> Tensor:
    """Return bool [N]: |Σ_t Δ_t| <= c·√L, False where the sum is not finite.

    Independent noise with a deviation of σ per token gives the sum the deviation σ·√L, so the gate rejects
    the share P(|Z| > c/σ) at every length. A constant limit on the sum rejects mostly long responses, one on
    the mean ΣΔ/L mostly short ones. With c of 3σ to 4σ, in nats per √token, sound responses pass. Raises
    ``ValueError`` unless c is above 0. Source: ours, FSPO's argument applied to the sampler's noise.
    """
    require_positive("c", c)
    return log_ratio_sums.isfinite() & (log_ratio_sums.abs() <= c * lengths.to(log_ratio_sums.dtype).sqrt())
