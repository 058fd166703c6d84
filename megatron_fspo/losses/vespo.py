"""VESPO: a smooth weight of the whole response instead of a clip."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.objective import unclipped
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, weigh_sequences


class VESPOLoss(Loss):
    """VESPO (2602.10693): weigh a response by a gamma-shaped kernel of e^S instead of a clip. temper is ours.

    `J_t = sg(phi) A log pi`, phi = w^k e^(lambda (1 - w)), w = e^(S / L^temper); k and lambda depend on the
    sign of A; mean over tokens. At temper = 0.5, noise gives phi the same spread at every length.
    """

    VERIFIED: ClassVar = {"vespo": {"temper": 0.25}}
    CLIPS: ClassVar = False

    name: Literal["vespo"] = "vespo"
    k_pos: PositiveFloat = Field(2.0, description="k for A > 0")
    lambda_pos: PositiveFloat = Field(3.0, description="lambda for A > 0")
    k_neg: PositiveFloat = Field(3.0, description="k for A < 0")
    lambda_neg: PositiveFloat = Field(2.0, description="lambda for A < 0")
    temper: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="b of w = exp(S / L^b); 0 in the paper"
    )

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = phi(w)·A, w = exp(S / L^temper); mean over tokens."""
        (log_ratio_sum,) = inputs.sequence_sums(inputs.log_ratio[None])
        lengths = inputs.lengths.to(log_ratio_sum)
        advantages = inputs.advantages.to(log_ratio_sum)
        log_w = log_ratio_sum * lengths.clamp(min=1) ** -self.temper
        pairs = ((self.k_pos, self.k_neg), (self.lambda_pos, self.lambda_neg))
        k, lam = (torch.where(advantages > 0, *(log_w.new_full((), x) for x in pair)) for pair in pairs)
        # -expm1 is 1 - w without cancellation, and phi is 0 where w overflows.
        phi = (k * log_w - lam * log_w.expm1()).exp()
        weight = torch.where(advantages != 0, phi * advantages, 0.0)
        present = lengths > 0
        usable = present & log_ratio_sum.isfinite() & advantages.isfinite() & weight.isfinite()
        token = torch.where(usable, weight, 0.0) * (inputs.num_sequences / max(inputs.num_tokens, 1))
        terms = unclipped(
            objective=token * lengths,
            weight=token,
            ratio=torch.where(usable, phi, 0.0),
            nonfinite=present & ~usable,
        )
        return weigh_sequences(inputs, log_ratio_sum, terms)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        w = (log_ratio.detach().sum() / len(log_ratio) ** self.temper).exp().item()
        k, lam = (self.k_pos, self.lambda_pos) if advantage > 0 else (self.k_neg, self.lambda_neg)
        phi = w**k * math.exp(lam * (1 - w))
        return Definition(
            # log pi up to a constant, so that the value is phi * A
            objective=phi * advantage * (1 + log_probs - log_probs.detach()),
            mean="token",
            clipped=0.0,
            out_of_band=False,
        )
