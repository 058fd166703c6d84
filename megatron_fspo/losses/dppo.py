"""DPPO: a trust region on token probabilities instead of ratios."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.objective import unclipped
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token, weigh_tokens
from megatron_fspo.section import UnitInterval


class DPPOTVLoss(Loss):
    """DPPO-Binary-TV (2602.04879): drop tokens whose probability has moved by more than delta in the
    direction of A. The cap is verl's; the default deltas are ours.

    `J_t = sg(min(r, cap)) A log pi`; mean over tokens.
    """

    VERIFIED: ClassVar = {"dppo-tv": {"delta_low": 0.0005, "delta_high": 0.001, "cap": 1.06}}
    DECIDES_BY_RATIOS: ClassVar = False

    name: Literal["dppo_tv"] = "dppo_tv"
    delta_low: UnitInterval = Field(0.1, description="pi >= pi_old - delta_low, for A < 0")
    delta_high: UnitInterval = Field(0.1, description="pi <= pi_old + delta_high, for A > 0")
    cap: Annotated[float, Field(gt=1)] = Field(20.0, description="largest weight of a token")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = min(r_t, cap)·A, or 0 where π − π_old passes −delta_low or delta_high with A."""
        log_ratio = torch.where(inputs.loss_mask, inputs.log_ratio, 0.0)
        new = torch.where(inputs.loss_mask, inputs.log_probs, 0.0)
        advantages = per_token(inputs.advantages, inputs).to(log_ratio.dtype)
        # π − π_old = π_old·(r − 1), without subtracting two nearly equal numbers.
        moved = (new - log_ratio).exp() * log_ratio.expm1()
        below, above = moved < -self.delta_low, moved > self.delta_high
        low, high = (advantages < 0) & below, (advantages > 0) & above
        ratio = log_ratio.clamp(max=math.log(self.cap)).exp()
        usable = log_ratio.isfinite() & new.isfinite() & advantages.isfinite()
        weight = torch.where(usable & ~(low | high) & (advantages != 0), ratio * advantages, 0.0)
        flags = {"clipped_low": low, "clipped_high": high, "below": below, "above": above}
        flags = {name: usable & flag for name, flag in flags.items()}
        terms = unclipped(weight, weight, torch.where(usable, ratio, 0.0), ~usable, **flags)
        return weigh_tokens(inputs, terms, "token-mean")

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        new, old = log_probs.detach().exp(), (log_probs - log_ratio).detach().exp()
        below, above = new - old < -self.delta_low, new - old > self.delta_high
        inside = ~(above if advantage > 0 else below)
        weight = log_ratio.detach().exp().clamp(max=self.cap) * inside * advantage
        return Definition(
            # log pi up to a constant, so that the value is the weight
            objective=weight * (1 + log_probs - log_probs.detach()),
            mean="token",
            clipped=(~inside).double().mean().item() if advantage else 0.0,
            out_of_band=bool((below | above).any()),
        )
