"""verl's published losses are ours: its registered functions on random log-probs, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peer_losses import Responses, as_written, random_responses
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from megatron_fspo.losses import CISPOLoss, DAPOLoss, DPPOTVLoss, GMPOLoss, GRPOLoss, GSPOLoss, Loss, SAPOLoss

# verl and Ray announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")

SEQUENCES = "seq-mean-token-mean"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss of ours, and what makes verl's the same."""

    ours: Loss
    name: str
    theirs: dict[str, Any]
    mode: str = "token-mean"
    value: bool = True
    """Whether J is reported alike, too: verl has log π in it where we have 1."""


def limits(low: float, high: float, **more: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high, **more}


CASES = {
    "grpo": Case(
        ours=GRPOLoss(eps_low=0.1, eps_high=0.12, dual_clip_ratio=1.15),
        name="vanilla",
        theirs=limits(0.1, 0.12, clip_ratio_c=1.15),
        mode=SEQUENCES,
    ),
    "dapo": Case(
        ours=DAPOLoss(eps_low=0.1, eps_high=0.15, dual_clip_ratio=3.0),
        name="vanilla",
        theirs=limits(0.1, 0.15),
    ),
    "gspo": Case(
        ours=GSPOLoss(eps_low=0.02, eps_high=0.02),
        name="gspo",
        theirs=limits(0.02, 0.02),
        mode=SEQUENCES,
    ),
    "cispo": Case(
        ours=CISPOLoss(eps_low=0.1, eps_high=0.1), name="cispo", theirs=limits(0.1, 0.1), value=False
    ),
    "sapo": Case(
        ours=SAPOLoss(tau_pos=1.5, tau_neg=3.0), name="sapo", theirs={"tau_pos": 1.5, "tau_neg": 3.0}
    ),
    "gmpo": Case(ours=GMPOLoss(eps_low=0.1, eps_high=0.12), name="geo_mean", theirs=limits(0.1, 0.12)),
    "dppo_tv": Case(
        ours=DPPOTVLoss(delta_low=0.01, delta_high=0.012, cap=1.1),
        name="dppo_tv",
        theirs=limits(0.01, 0.012, clip_ratio_c=1.1),
        value=False,
    ),
}


def by_verl(
    name: str, theirs: dict[str, Any], mode: str, responses: Responses, rows: slice = slice(None)
) -> tuple[float, Tensor]:
    """The loss of some rows as one micro-batch of the optimizer step, and its gradient [n, T]."""
    new, mask = responses.leaf(), responses.mask
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2, **theirs)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask), loss_scale_factor=None
    )
    advantages = responses.advantages[:, None] * mask
    columns = (responses.old, new, advantages, mask)
    loss, _ = get_policy_loss_fn(name)(*(column[rows] for column in columns), mode, config)
    loss.backward()
    return loss.item(), new.grad


@pytest.mark.parametrize("name", CASES)
def test_a_published_loss_is_ours(name: str) -> None:
    case = CASES[name]
    for seed in range(4):
        responses = random_responses(seed)
        value, gradient = as_written(case.ours, responses)
        their_value, theirs = by_verl(case.name, case.theirs, case.mode, responses)
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(theirs, gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item())
        if case.value:
            assert their_value == pytest.approx(value, abs=1e-6)


def test_its_gspo_is_by_default_no_mean_over_sequences() -> None:
    """token-mean: of two responses of 10 and 100 tokens with the same A, the short one has 1 / 11."""
    for mode, share in (("token-mean", 1 / 11), (SEQUENCES, 1 / 2)):
        mask = torch.arange(100) < torch.tensor([10, 100])[:, None]
        zeros = torch.zeros(2, 100, dtype=torch.float64)
        responses = Responses(old=zeros, new=zeros, mask=mask, advantages=torch.ones(2).double())
        _, gradient = by_verl("gspo", limits(0.02, 0.02), mode, responses)
        mass = gradient.abs().sum(dim=1)
        assert (mass[0] / mass.sum()).item() == pytest.approx(share)


def test_its_gmpo_depends_on_the_micro_batches() -> None:
    """A mean over the micro-batch, without a count of the step: half the rows, twice the gradient."""
    responses = random_responses(0)
    _, whole = by_verl("geo_mean", limits(0.1, 0.1), "token-mean", responses)
    _, half = by_verl("geo_mean", limits(0.1, 0.1), "token-mean", responses, slice(6))
    torch.testing.assert_close(half[:6], 2 * whole[:6])
