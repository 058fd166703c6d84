"""FSPO through SkyRL's registry, with the advantages that its own reduction scales."""

from __future__ import annotations

import pytest
import torch
from peer_losses import Responses, as_written, random_responses
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.train.config import AlgorithmConfig
from torch import Tensor

import megatron_fspo.adapters.skyrl  # noqa: F401  registers the loss
from megatron_fspo.losses import FSPOLoss

# SkyRL and Ray announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")


def algorithm(**keys: object) -> AlgorithmConfig:
    limits = {"eps_clip_low": 0.05, "eps_clip_high": 0.04, "loss_reduction": "sequence_mean"}
    return AlgorithmConfig(policy_loss_type="fspo", **(limits | keys))


def by_skyrl(
    responses: Responses, config: AlgorithmConfig, micro_batches: int = 1
) -> tuple[float, Tensor, dict[str, float]]:
    """The losses of all micro-batches of one mini-batch, added up, and their gradient [n, T]."""
    new, mask = responses.leaf(), responses.mask.double()
    advantages = apply_loss_reduction_to_advantages_minibatch(
        responses.advantages[:, None] * mask, mask, config.loss_reduction, len(new) // micro_batches, 30
    )
    function = PolicyLossRegistry.get(config.policy_loss_type)
    total, metrics = 0.0, {}
    for part in torch.arange(len(new)).chunk(micro_batches):
        loss, metrics = function(
            new[part], responses.old[part], advantages[part], config, mask[part], rollout_logprobs=None
        )
        loss.backward()
        total += loss.item()
    return total, new.grad, metrics


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_gradient_is_that_of_the_definition(micro_batches: int) -> None:
    for seed in range(4):
        responses = random_responses(seed)
        value, gradient = as_written(FSPOLoss(c_low=0.05, c_high=0.04), responses)
        theirs, found, metrics = by_skyrl(responses, algorithm(), micro_batches)
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)
        assert theirs == pytest.approx(value, abs=1e-9)
        assert 0 <= metrics["fspo/clip_low"] <= metrics["fspo/out_of_band"] <= 1


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"eps_clip_high": 0.2}, "SkyRL's default for a ratio: set both of them"),
        ({"loss_reduction": "token_mean"}, "loss_reduction = 'token_mean' is not supported with FSPO"),
        ({"eps_clip_low": -1.0}, "c_low"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(keys: dict[str, object], found: str) -> None:
    with pytest.raises(ValueError, match=found) as error:
        by_skyrl(random_responses(0), algorithm(**keys))
    assert "\n" not in str(error.value)


def test_a_type_for_long_responses() -> None:
    assert PolicyLossRegistry.get("fspo_centred").keywords == {"centred": True}


def test_its_corrections_are_refused() -> None:
    config = algorithm()
    config.off_policy_correction.tis_ratio_type = "sequence"
    with pytest.raises(ValueError, match="off_policy_correction is not supported with FSPO"):
        by_skyrl(random_responses(0), config)
