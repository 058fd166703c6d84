"""CPPO and PNPO: losses that judge a token by the tokens before it in its response."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.losses.ratio import scaled_limits, widest_limits
from megatron_fspo.objective import GSPOBand, unclipped
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token, weigh_tokens
from megatron_fspo.section import UnitInterval


class CPPOLoss(Loss):
    """CPPO (2606.10968), Binary-TV: a trust region on probabilities, stricter for early tokens and after
    large earlier moves. Defaults are the paper's for post-trained dense models.

    `J_t = r A`, and 0 if r has moved from 1 in the direction of A and either `w_t D_t > delta`, or the sum of
    w D up to t exceeds delta + budget * (sum of w before t). D = abs(pi - pi_old); w falls linearly from 1 to
    last_weight; mean over tokens. The paper's budget for base models, a quantile of D, is not implemented.
    """

    VERIFIED: ClassVar = {"cppo": {"delta": 0.001, "budget": 0.0002, "last_weight": 0.5}}
    DECIDES_BY_RATIOS: ClassVar = False
    COLLECTIVES: ClassVar = 3
    LIMITS: ClassVar = ("delta", "budget")

    name: Literal["cppo"] = "cppo"
    delta: UnitInterval = Field(0.15, description="w * abs(pi - pi_old) <= delta for each token")
    budget: UnitInterval = Field(
        0.015, description="allowed mean of w * abs(pi - pi_old) over earlier tokens"
    )
    last_weight: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="w of the last token")

    def _region(self, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return [t] w·|π − π_old| of each token, its sum over earlier tokens, and the sum of w over them."""
        log_ratio = torch.where(inputs.loss_mask, inputs.log_ratio, 0.0)
        old = torch.where(inputs.loss_mask, inputs.log_probs - inputs.log_ratio, 0.0)
        lengths = per_token(inputs.lengths, inputs).to(log_ratio.dtype)
        place = torch.where(inputs.loss_mask, inputs.prefix_sums(torch.ones_like(old)[None])[0], 1.0)
        share = 1 - (1 - self.last_weight) * (place - 1) / (lengths - 1).clamp(min=1)
        # π − π_old = π_old·(r − 1), without subtracting two nearly equal numbers.
        moved = share * (old.exp() * log_ratio.expm1()).abs()
        columns = torch.stack([moved, share])
        spent, room = inputs.prefix_sums(columns) - columns
        return moved, spent, room

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = r_t·A, or 0 where the token has moved too far in the direction of A."""
        moved, spent, room = self._region(inputs)
        log_ratio = torch.where(inputs.loss_mask, inputs.log_ratio, 0.0)
        new = torch.where(inputs.loss_mask, inputs.log_probs, 0.0)
        advantages = per_token(inputs.advantages, inputs).to(log_ratio.dtype)
        outside = moved > self.delta + (self.budget * room - spent).clamp(max=0.0)
        below, above = outside & (log_ratio < 0), outside & (log_ratio > 0)
        low, high = (advantages < 0) & below, (advantages > 0) & above
        ratio = log_ratio.exp()
        weight = torch.where(~(low | high) & (advantages != 0), ratio * advantages, 0.0)
        usable = log_ratio.isfinite() & new.isfinite() & advantages.isfinite() & weight.isfinite()
        weight, ratio = (torch.where(usable, values, 0.0) for values in (weight, ratio))
        flags = {"clipped_low": low, "clipped_high": high, "below": below, "above": above}
        flags = {name: usable & flag for name, flag in flags.items()}
        return weigh_tokens(inputs, unclipped(weight, weight, ratio, ~usable, **flags), "token-mean")

    def token_reach(self, inputs: LossInputs) -> Tensor:
        moved, spent, room = self._region(inputs)
        return torch.maximum(moved / self.delta, (moved + spent) / (self.delta + self.budget * room))

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update={"delta": factor * self.delta, "budget": factor * self.budget})

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        ratio, moved = log_ratio.exp(), (log_probs.exp() - (log_probs - log_ratio).exp()).abs().tolist()
        keep, outside, spent, room, last = [], [], 0.0, 0.0, max(len(moved) - 1, 1)
        for t, (distance, r) in enumerate(zip(moved, ratio.tolist(), strict=True)):
            w = 1 - (1 - self.last_weight) * t / last
            far = w * distance > min(self.delta, self.delta + self.budget * room - spent)
            outside.append(far)
            keep.append(advantage * (r - 1) <= 0 or not far)
            spent, room = spent + w * distance, room + w
        return Definition(
            objective=torch.tensor(keep, dtype=ratio.dtype) * ratio * advantage,
            mean="token",
            clipped=1 - sum(keep) / len(keep) if advantage else 0.0,
            out_of_band=any(outside),
        )


class PNPOLoss(Loss):
    """PNPO (2608.01418, second-hand): weigh a token by the geometric mean of the ratios up to it, and reject
    it if this is outside the limits. Limits and mean over tokens are ours.

    `J_t = sg(g) A log pi`, g = e^(S_t / t), and 0 outside [1 - eps_low, 1 + eps_high] for A of either sign.
    """

    VERIFIED: ClassVar = {"pnpo": {"eps_low": 0.02, "eps_high": 0.03}}
    LIMITS: ClassVar = ("eps_low", "eps_high")

    name: Literal["pnpo"] = "pnpo"
    eps_low: UnitInterval = Field(0.2, description="geometric mean >= 1 - eps_low")
    eps_high: PositiveFloat = Field(0.2, description="geometric mean <= 1 + eps_high")

    def prefix_band(self) -> GSPOBand:
        return GSPOBand(eps_low=self.eps_low, eps_high=self.eps_high)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = g_t·A, or 0 where g_t is outside its limits."""
        columns = torch.stack([inputs.log_ratio, torch.ones_like(inputs.log_ratio)])
        prefix, place = torch.where(inputs.loss_mask, inputs.prefix_sums(columns), 0.0)
        low, high = self.prefix_band().bounds(place)
        below, above = prefix < low, prefix > high
        advantages = per_token(inputs.advantages, inputs).to(prefix.dtype)
        counted = advantages != 0
        ratio = (prefix / place.clamp(min=1)).exp()
        weight = torch.where(counted & ~(below | above), ratio * advantages, 0.0)
        usable = prefix.isfinite() & advantages.isfinite() & weight.isfinite()
        weight, ratio = (torch.where(usable, values, 0.0) for values in (weight, ratio))
        flags = {
            "clipped_low": counted & below,
            "clipped_high": counted & above,
            "below": below,
            "above": above,
        }
        flags = {name: usable & flag for name, flag in flags.items()}
        return weigh_tokens(inputs, unclipped(weight, weight, ratio, ~usable, **flags), "token-mean")

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update=scaled_limits(self.eps_low, self.eps_high, factor))

    def widest(self) -> float:
        return widest_limits(self.eps_low, self.eps_high)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        s = log_ratio.detach()
        mean = torch.stack([s[: t + 1].mean().exp() for t in range(len(s))])
        inside = (mean >= 1 - self.eps_low) & (mean <= 1 + self.eps_high)
        return Definition(
            objective=mean * inside * advantage * (1 + log_probs - log_probs.detach()),
            mean="token",
            clipped=(~inside).double().mean().item() if advantage else 0.0,
            out_of_band=not bool(inside.all()),
        )
