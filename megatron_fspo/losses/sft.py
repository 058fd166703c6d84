"""SFT: the cross-entropy of given responses."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.objective import unclipped
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token, weigh_tokens


class SFTLoss(Loss):
    """Supervised fine-tuning: the cross-entropy of the responses in `data.train`, without rollouts.

    `J_t = A log pi` with A = 1; mean over the tokens of the whole optimizer step.
    """

    VERIFIED: ClassVar = {"sft": {}}
    SUPERVISED: ClassVar = True
    CLIPS: ClassVar = False

    name: Literal["sft"] = "sft"

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return weight_t = A."""
        log_probs = torch.where(inputs.loss_mask, inputs.log_probs, 0.0)
        weight = per_token(inputs.advantages, inputs).to(log_probs.dtype)
        terms = unclipped(weight * log_probs, weight, torch.ones_like(weight), ~log_probs.isfinite())
        return weigh_tokens(inputs, terms, "token-mean")

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        return Definition(objective=advantage * log_probs, mean="token", clipped=0.0, out_of_band=False)

    def check(self, *, off_policy_updates: int, sampled: bool) -> None:
        if self.kl_coef:
            raise ValueError("loss.kl_coef needs responses of the policy: loss.name = sft has none")
