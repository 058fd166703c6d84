"""CTPO: FSPO's band on every prefix of a response."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss, pessimistic_minimum
from megatron_fspo.objective import FSPOBand, LengthFairDualClip, sequence_surrogate
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token, weigh_tokens

Width = Annotated[float, Field(gt=0, le=3)]


class CTPOLoss(Loss):
    """CTPO (2605.07331): clip each prefix's ratio to a band that grows as t^exponent. Defaults are those of
    the authors' code.

    `J_t = min(e^S_t A, e^clip(S_t) A)`, with the gradient of token t alone; mean over tokens. The authors'
    code also caps S_t at 10; here, a ratio that overflows drops its response.
    """

    VERIFIED: ClassVar = {"ctpo": {"c_low": 0.04, "c_high": 0.05}}
    LIMITS: ClassVar = ("c_low", "c_high")

    name: Literal["ctpo"] = "ctpo"
    c_low: Width = Field(0.025, description="lower edge: -c_low * t^exponent, in nats")
    c_high: Width = Field(0.05, description="upper edge: c_high * t^exponent, in nats")
    exponent: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="0.5 in the paper")
    c_dual: Width | None = Field(
        0.05, description="upper limit of S_t for A < 0: c_dual * t^exponent; none: no limit"
    )

    def prefix_band(self) -> FSPOBand:
        return FSPOBand(c_low=self.c_low, c_high=self.c_high, exponent=self.exponent)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = exp(S_t)·A, or 0 where a clip acts: that of a response that ends with token t."""
        columns = torch.stack([inputs.log_ratio, torch.ones_like(inputs.log_ratio)])
        prefix, length = torch.where(inputs.loss_mask, inputs.prefix_sums(columns), 0.0)
        c = self.c_dual
        dual_clip = None if c is None else LengthFairDualClip(c=c, exponent=self.exponent)
        advantages = per_token(inputs.advantages, inputs)
        terms = sequence_surrogate(prefix, length, advantages, self.prefix_band(), dual_clip)
        return weigh_tokens(inputs, terms, "token-mean")

    def scaled(self, factor: float) -> Self:
        c_dual = None if self.c_dual is None else factor * self.c_dual
        wider = {"c_low": factor * self.c_low, "c_high": factor * self.c_high, "c_dual": c_dual}
        return self.model_copy(update=wider)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        before = torch.stack([log_ratio[:t].detach().sum() for t in range(len(log_ratio))])
        s = before + log_ratio
        width = torch.arange(1, len(s) + 1, dtype=s.dtype) ** self.exponent
        held = torch.minimum(torch.maximum(s, -self.c_low * width), self.c_high * width)
        limit = None if self.c_dual is None else (self.c_dual * width).exp()
        objective, clipped = pessimistic_minimum(log_ratio, advantage, s.exp(), held.exp(), limit)
        return Definition(
            objective=objective, mean="token", clipped=clipped, out_of_band=bool((s != held).any())
        )
