"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token


class GMPOLoss(Loss):
    """GMPO (2507.20673): geometric mean of token ratios, each clipped in log space.

    `J = e^(mean of clipped log r) A`; mean over sequences.
    """

    VERIFIED: ClassVar = {"gmpo": {"eps_low": 0.04, "eps_high": 0.05}}

    name: Literal["gmpo"] = "gmpo"
    eps_low: PositiveFloat = Field(0.4, description="log of the token ratio >= -eps_low for A < 0")
    eps_high: PositiveFloat = Field(0.4, description="log of the token ratio <= eps_high for A > 0")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """weight_t = exp(mean of the clipped log-ratios)·A / L, or 0 where that of the token is clipped."""
        log_ratio = torch.where(inputs.loss_mask, inputs.log_ratio, 0.0)
        advantage = per_token(inputs.advantages, inputs)
        below, above = log_ratio < -self.eps_low, log_ratio > self.eps_high
        low, high = (advantage < 0) & below, (advantage > 0) & above
        held = torch.where(low, -self.eps_low, torch.where(high, self.eps_high, log_ratio))
        flags = [flag.to(log_ratio) for flag in (low, high, below | above)]
        sums = inputs.sequence_sums(torch.stack([log_ratio, held, *flags]))
        lengths = inputs.lengths.to(log_ratio).clamp(min=1)
        ratio = (sums[1] / lengths).exp()
        value = torch.where(inputs.advantages != 0, ratio * inputs.advantages, 0.0)
        broken = ~(sums[0].isfinite() & value.isfinite())
        kept = [torch.where(broken, 0.0, row) for row in (ratio, value, *sums[2:] / lengths)]
        columns = torch.stack([*kept, broken.to(log_ratio)])
        ratio, value, clipped_low, clipped_high, outside, dropped = inputs.decided(columns)
        token = per_token(value / lengths, inputs)
        token = torch.where(inputs.loss_mask, token, 0.0)
        return LossTerms(
            log_ratio_sum=sums[0],
            weight=torch.where(low | high, 0.0, token),
            ratio=ratio,
            objective=token.sum(),
            clipped_low=clipped_low,
            clipped_high=clipped_high,
            dual_clipped=torch.zeros_like(clipped_low),
            out_of_band=outside > 0,
            nonfinite=dropped > 0,
        )

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        held = log_ratio.clamp(max=self.eps_high) if advantage > 0 else log_ratio.clamp(min=-self.eps_low)
        inside = log_ratio.clamp(-self.eps_low, self.eps_high)
        return Definition(
            objective=held.mean().exp()[None] * advantage,
            clipped=(held != log_ratio).double().mean().item() if advantage else 0.0,
            out_of_band=bool((inside != log_ratio).any()),
        )
