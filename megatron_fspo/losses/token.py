"""GRPO, DAPO and OPSM: one importance ratio and one clip decision per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss, pessimistic_minimum
from megatron_fspo.objective import ConstantDualClip, RLOOBand, sequence_surrogate
from megatron_fspo.objective.surrogate import Aggregation, LossInputs, LossTerms, per_token, weigh_tokens
from megatron_fspo.section import UnitInterval


class TokenLoss(Loss):
    """Base class: limits on the importance ratio of each token."""

    AGGREGATION: ClassVar[Aggregation] = "sequence-mean"

    eps_low: UnitInterval = Field(0.2, description="token ratio >= 1 - eps_low")
    dual_clip_ratio: Annotated[float, Field(gt=1)] | None = Field(
        None, description="upper limit of the token ratio for A < 0"
    )
    eps_high: PositiveFloat = Field(0.2, description="token ratio <= 1 + eps_high")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = r_t·A, or 0 where a clip acts: the surrogate of sequences of one token."""
        ratio = self.dual_clip_ratio
        terms = sequence_surrogate(
            torch.where(inputs.loss_mask, inputs.log_ratio, 0.0),
            torch.ones_like(inputs.log_ratio),
            per_token(inputs.advantages, inputs),
            RLOOBand(eps_low=self.eps_low, eps_high=self.eps_high),
            dual_clip=None if ratio is None else ConstantDualClip(ratio=ratio),
        )
        return weigh_tokens(inputs, terms, self.AGGREGATION)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        ratio = log_ratio.exp()
        held = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        limit = None if self.dual_clip_ratio is None else ratio.new_tensor(self.dual_clip_ratio)
        objective, clipped = pessimistic_minimum(log_ratio, advantage, ratio, held, limit)
        return Definition(
            objective=objective,
            mean="token" if self.AGGREGATION == "token-mean" else "sequence",
            clipped=clipped,
            out_of_band=bool((ratio != held).any()),
        )


class GRPOLoss(TokenLoss):
    """GRPO (2402.03300): clipped token ratios.

    `J_t = min(r A, clip(r) A)`; mean over each sequence, then over sequences.
    """

    VERIFIED: ClassVar = {
        "grpo": {"eps_low": 0.05, "eps_high": 0.05, "dual_clip_ratio": 1.08},
        "grpo-kl": {"eps_low": 0.05, "eps_high": 0.05, "kl_coef": 0.3},
    }

    name: Literal["grpo"] = "grpo"


class DAPOLoss(TokenLoss):
    """DAPO (2503.14476): GRPO with a higher upper limit and a mean over tokens."""

    VERIFIED: ClassVar = {"dapo": {"eps_low": 0.05, "eps_high": 0.06}}
    AGGREGATION: ClassVar[Aggregation] = "token-mean"

    name: Literal["dapo"] = "dapo"
    eps_high: PositiveFloat = Field(0.28, description="token ratio <= 1 + eps_high")


class OPSMLoss(TokenLoss):
    """Off-policy sequence masking (DeepSeek-V3.2, 2512.02556): GRPO, dropping responses with A < 0 and
    -S / L > delta. The default delta is ours.

    Dropped responses count as clipped below. S starts from the old policy, or from the sampler with
    `rollout.old_log_probs = "sampled"`.
    """

    VERIFIED: ClassVar = {"opsm": {"eps_low": 0.05, "eps_high": 0.05, "delta": 0.01}}

    name: Literal["opsm"] = "opsm"
    delta: PositiveFloat = Field(1e-3, description="drop if A < 0 and -S / L > delta, in nats per token")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return GRPO's weights, but 0 for sequences with A < 0 and −S/L > delta. One more collective."""
        (log_ratio_sum,) = inputs.sequence_sums(inputs.log_ratio[None])
        far = -log_ratio_sum > self.delta * inputs.lengths
        dropped = (inputs.advantages < 0) & far & log_ratio_sum.isfinite()
        kept = replace(inputs, advantages=torch.where(dropped, 0.0, inputs.advantages))
        terms = super().__call__(kept)
        return replace(terms, clipped_low=torch.where(dropped, 1.0, terms.clipped_low))

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        plain = super().definition(log_ratio, advantage, log_probs)
        if not (advantage < 0 and -log_ratio.mean() > self.delta):
            return plain
        return replace(plain, objective=0 * log_ratio, clipped=1.0)
