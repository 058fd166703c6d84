"""CISPO: every token keeps its gradient, with a clipped importance weight."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.objective import unclipped
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token, weigh_tokens
from megatron_fspo.section import UnitInterval


class CISPOLoss(Loss):
    """CISPO (MiniMax-M1, 2506.13585): weigh each token's gradient by its clipped ratio. The paper does not
    give its upper limit; the default is ours.

    `J_t = sg(clip(r)) A log pi`, so clipped tokens keep a gradient; mean over tokens. In the paper there is
    no lower limit.
    """

    VERIFIED: ClassVar = {"cispo": {"eps_low": 0.05, "eps_high": 0.04}}

    name: Literal["cispo"] = "cispo"
    eps_low: UnitInterval | None = Field(None, description="weight >= 1 - eps_low; default: no lower limit")
    eps_high: PositiveFloat = Field(0.28, description="weight <= 1 + eps_high")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = clip(r_t, 1 − eps_low, 1 + eps_high)·A; the clip flags mark clipped weights."""
        log_ratio = torch.where(inputs.loss_mask, inputs.log_ratio, 0.0)
        advantages = per_token(inputs.advantages, inputs).to(log_ratio.dtype)
        lowest = -math.inf if self.eps_low is None else math.log1p(-self.eps_low)
        highest = math.log1p(self.eps_high)
        ratio = log_ratio.clamp(lowest, highest).exp()
        weight = torch.where(advantages != 0, ratio * advantages, 0.0)
        usable = log_ratio.isfinite() & weight.isfinite()
        below, above = usable & (log_ratio < lowest), usable & (log_ratio > highest)
        low, high = below & (advantages != 0), above & (advantages != 0)
        flags = {"clipped_low": low, "clipped_high": high, "below": below, "above": above}
        terms = unclipped(weight, weight, ratio, ~usable, **flags)
        return weigh_tokens(inputs, terms, "token-mean")

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        ratio = log_ratio.exp()
        held = ratio.clamp(None if self.eps_low is None else 1 - self.eps_low, 1 + self.eps_high).detach()
        outside = (held != ratio.detach()).double()
        return Definition(
            # log pi up to a constant, so that the value is held * A
            objective=held * advantage * (1 + log_ratio - log_ratio.detach()),
            mean="token",
            clipped=outside.mean().item() if advantage else 0.0,
            out_of_band=bool(outside.any()),
        )
