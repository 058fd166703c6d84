"""CTPO's authors' own function is our loss; it is in their fork of verl, of which this needs one file.

``CTPO_SOURCE`` names a clone of https://github.com/horizon-llm/CTPO (seen at acc4021). What their file
imports is found in the verl that is installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_losses import Responses, as_written, random_responses
from verl.workers.config import FSDPActorConfig

from megatron_fspo.losses import CTPOLoss

SOURCE = os.environ.get("CTPO_SOURCE")

pytestmark = [
    pytest.mark.skipif(SOURCE is None, reason="CTPO_SOURCE names no clone of horizon-llm/CTPO"),
    # verl and Ray announce what they are going to remove.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def published() -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    file = Path(str(SOURCE)) / "verl/trainer/ppo/core_algos.py"
    spec = importlib.util.spec_from_file_location("ctpo_core_algos", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., tuple[torch.Tensor, dict[str, Any]]] = module.get_policy_loss_fn(
        "cum-token-cumprod-la"
    )
    return found


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_its_authors_function_is_ours(published: Any, spread: float, seed: int) -> None:
    """With its default widths, which are ours: 0.025, 0.05 and 0.05 nats per √token."""
    responses: Responses = random_responses(seed, spread=spread)
    value, gradient = as_written(CTPOLoss(), responses)
    new, mask = responses.leaf(), responses.mask
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask), loss_scale_factor=None
    )
    advantages = responses.advantages[:, None] * mask
    loss, _ = published(responses.old, new, advantages, mask, "token-mean", config)
    loss.backward()
    assert new.grad is not None and gradient.abs().max() > 1e-4
    torch.testing.assert_close(new.grad, gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item())
    assert loss.item() == pytest.approx(value, abs=1e-6)
