"""SAPO: a soft gate on each token's ratio instead of a clip."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.objective import unclipped
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token, weigh_tokens

# Beyond this log-ratio, the weight is 0 in floating point, and e^x may overflow.
_LARGEST = 20.0


class SAPOLoss(Loss):
    """SAPO (2511.20347): a sigmoid gate on the token ratio instead of a clip.

    `J_t = 4 / tau sigmoid(tau (r - 1)) A`, tau by the sign of A; mean over each sequence, then over
    sequences.
    """

    VERIFIED: ClassVar = {"sapo": {"tau_neg": 4.0}}
    CLIPS: ClassVar = False

    name: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = Field(1.0, description="tau for A > 0")
    tau_neg: PositiveFloat = Field(1.05, description="tau for A < 0; a larger tau narrows the gate")

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = 4·p·(1 − p)·r·A with p = sigmoid(τ(r − 1)); mean over each sequence."""
        log_ratio = torch.where(inputs.loss_mask, inputs.log_ratio, 0.0)
        advantages = per_token(inputs.advantages, inputs).to(log_ratio.dtype)
        x = log_ratio.clamp(max=_LARGEST)
        tau = torch.where(advantages > 0, x.new_full((), self.tau_pos), x.new_full((), self.tau_neg))
        distance = tau * x.expm1()
        gate = 4 / tau * distance.sigmoid()
        slope = 4 * distance.sigmoid() * (-distance).sigmoid() * x.exp()
        usable = log_ratio.isfinite() & advantages.isfinite()
        there = usable & (advantages != 0)
        terms = unclipped(
            objective=torch.where(there, gate * advantages, 0.0),
            weight=torch.where(there, slope * advantages, 0.0),
            ratio=torch.where(usable, slope, 0.0),
            nonfinite=~usable,
        )
        return weigh_tokens(inputs, terms, "sequence-mean")

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        tau = self.tau_pos if advantage > 0 else self.tau_neg
        gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
        return Definition(objective=gate * advantage, clipped=0.0, out_of_band=False)
