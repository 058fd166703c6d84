"""TRL's published losses are ours: ``_compute_loss`` of its trainers on random log-probs, in float64.

Only the model is replaced, by log-probs that are given. Gradients are with respect to these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_losses import Responses, as_written, random_responses
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl_batches import make_trainer

from megatron_fspo.losses import (
    CISPOLoss,
    DAPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    Loss,
    LUSPOLoss,
    OPSMLoss,
    RLOOLoss,
    SAPOLoss,
    VESPOLoss,
)

# TRL and transformers announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss of ours, and what makes TRL's the same."""

    ours: Loss
    theirs: dict[str, Any]
    trainer: Any = GRPOTrainer
    config: Any = GRPOConfig
    value: bool = True
    """Whether J is reported alike, too: TRL has log π in it where we have 1."""


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "grpo": Case(
        ours=GRPOLoss(eps_low=0.1, eps_high=0.12),
        theirs={"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.12},
    ),
    "dapo": Case(
        ours=DAPOLoss(eps_low=0.1, eps_high=0.15),
        theirs={"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.15},
    ),
    "cispo": Case(
        ours=CISPOLoss(eps_low=None, eps_high=0.1),
        theirs={"loss_type": "cispo", "epsilon_high": 1.1},  # the limit itself, and not its distance from 1
        value=False,
    ),
    "gspo": Case(
        ours=GSPOLoss(eps_low=0.02, eps_high=0.02),
        theirs={"loss_type": "grpo", "epsilon": 0.02, **SEQUENCE},
    ),
    "luspo": Case(
        ours=LUSPOLoss(eps_low=0.02, eps_high=0.02),
        theirs={"loss_type": "luspo", "epsilon": 0.02, **SEQUENCE},
    ),
    "sapo": Case(
        ours=SAPOLoss(tau_pos=1.5, tau_neg=3.0),
        theirs={"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 3.0},
    ),
    "vespo": Case(ours=VESPOLoss(), theirs={"loss_type": "vespo"}, value=False),
    "gmpo": Case(
        ours=GMPOLoss(eps_low=0.1, eps_high=0.12),
        theirs={"epsilon": 0.1, "epsilon_high": 0.12},
        trainer=GMPOTrainer,
        config=GMPOConfig,
    ),
    "opsm": Case(
        ours=OPSMLoss(eps_low=0.1, eps_high=0.1, delta=0.01),
        theirs={"loss_type": "grpo", "epsilon": 0.1, "off_policy_mask_threshold": 0.01},
    ),
    "rloo": Case(
        ours=RLOOLoss(eps_low=0.2, eps_high=0.2),
        theirs={"epsilon": 0.2, "beta": 0.0},
        trainer=RLOOTrainer,
        config=RLOOConfig,
    ),
}


def by_trl(trainer: Any, responses: Responses) -> tuple[float, Tensor]:
    """The loss and its gradient [n, T], of one micro-batch that is the whole optimizer step."""
    new, mask = responses.leaf(), responses.mask.long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    trainer.model.train()
    none = torch.zeros(len(new), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": responses.advantages,
        "old_per_token_logps": responses.old,
        "old_logps": (responses.old * mask).sum(dim=1),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), new.grad


@pytest.mark.parametrize("name", CASES)
def test_a_published_loss_is_ours(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    trainer = make_trainer(case.trainer, case.config, tmp_path, n=12, **case.theirs)
    for seed in range(4):
        responses = random_responses(seed)
        value, gradient = as_written(case.ours, responses)
        their_value, theirs = by_trl(trainer, responses)
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(theirs, gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item())
        if case.value:
            assert their_value == pytest.approx(value, abs=1e-6)
