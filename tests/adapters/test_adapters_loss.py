"""What all adapters share: S, the loss with its gradient, and the metrics. Needs torch alone."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys

import pytest
import torch

from launch import REPO
from megatron_fspo.adapters.sequence_loss import FSPO, log_ratio_sums, mean_loss, metrics


def padded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, old ones, mask [6, 9] and advantages [6]; the last response is empty."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 4, 1, 6, 2, 0])
    mask = torch.arange(9) < lengths[:, None]
    old = -torch.rand(6, 9, generator=generator)
    new = (old + 0.1 * torch.randn(6, 9, generator=generator)).requires_grad_()
    return new, old, mask, torch.tensor([1.0, -1.0, 0.5, 0.0, -2.0, 3.0])


def test_the_gradient_is_the_weight_and_the_value_is_the_objective() -> None:
    new, old, mask, advantages = padded()
    s = log_ratio_sums(new, old, mask)
    terms = FSPO(c_low=0.1, c_high=0.1).surrogate(s, mask.sum(dim=1), advantages)
    loss = mean_loss(s, terms, 5)
    loss.backward()
    assert loss.item() == pytest.approx(-terms.objective.sum().item() / 5)
    torch.testing.assert_close(new.grad, torch.where(mask, -terms.weight[:, None] / 5, 0.0))


def test_a_centred_band_moves_with_the_length() -> None:
    fspo = FSPO(c_low=0.03, c_high=0.05, centred=True)
    lengths = torch.tensor([1.0, 10_000.0], dtype=torch.float64)
    centre = -(0.02**2) / 2 * lengths  # σ̂ = c / 2, and the mean of c is 0.04
    for edge, clipped in ((0.05 - 1e-6, False), (0.05 + 1e-6, True)):
        terms = fspo.surrogate(centre + edge * lengths.sqrt(), lengths, torch.ones(2))
        assert terms.clipped_high.tolist() == [clipped, clipped]
    beyond = fspo.surrogate(centre + 0.1001 * lengths.sqrt(), lengths, -torch.ones(2))
    assert beyond.dual_clipped.all()


def test_a_width_that_is_meant_for_a_ratio_warns() -> None:
    with pytest.warns(UserWarning, match="nats per √token, not a ratio"):
        FSPO(c_low=0.2, c_high=0.2)


def test_what_is_outside_the_mask_or_not_finite_reaches_nothing() -> None:
    new, old, mask, advantages = padded()
    old = torch.where(mask, old, math.nan)
    old[1, 0] = -math.inf
    s = log_ratio_sums(new, old, mask)
    terms = FSPO(c_low=0.1, c_high=0.1).surrogate(s, mask.sum(dim=1), advantages)
    mean_loss(s, terms, 5).backward()
    assert new.grad.isfinite().all() and not new.grad[1].any() and new.grad[4, :2].all()
    assert metrics(s.detach(), mask.sum(dim=1), terms)["fspo/nonfinite_share"] == pytest.approx(0.2)


def test_sigma_hat_is_of_off_policy_responses_only() -> None:
    """A trainer averages it over micro-batches: zeros of on-policy ones would halve it."""
    lengths, one = torch.tensor([4, 9]), torch.ones(2)
    logged = []
    for s in (torch.zeros(2), torch.tensor([0.2, -0.3]), torch.tensor([math.nan, math.inf])):
        terms = FSPO(c_low=0.1, c_high=0.1).surrogate(s, lengths, one)
        logged.append(metrics(s, lengths, terms).get("fspo/sigma_hat"))
    assert logged == [None, pytest.approx(0.1 / 0.6745, rel=1e-3), None]


def test_sums_are_at_least_float32() -> None:
    new, old, mask, _ = padded()
    assert log_ratio_sums(new.bfloat16(), old, mask).dtype == torch.float32
    assert log_ratio_sums(new.double(), old, mask).dtype == torch.float64


def test_shares_are_of_responses_with_tokens() -> None:
    s, lengths = torch.tensor([0.5, -0.5, 0.5, 0.01, 0.0]), torch.tensor([4, 4, 4, 1, 0])
    terms = FSPO(c_low=0.1, c_high=0.1).surrogate(s, lengths, torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]))
    found = metrics(s, lengths, terms)
    assert found["fspo/sigma_hat"] == pytest.approx(0.25 / 0.6745, rel=1e-3)
    del found["fspo/sigma_hat"]
    assert found == {
        "fspo/clip_low": 0.25,
        "fspo/clip_high": 0.25,
        "fspo/dual_clip_frac": 0.25,
        "fspo/out_of_band": 0.75,
        "fspo/nonfinite_share": 0.0,
    }


@pytest.mark.parametrize(
    ("limits", "found"),
    [({"c_low": 0.0}, "c_low"), ({"c_high": -1.0}, "c_high"), ({"c_dual": 0.02}, "c_dual must be at least")],
)
def test_limits_are_checked(limits: dict[str, float], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        FSPO(**limits)


def test_the_package_needs_no_peer_and_the_shared_part_no_megatron() -> None:
    program = (
        "import sys, megatron_fspo.adapters.sequence_loss\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'trl', 'verl', 'tinker', 'megatron', 'pydantic', 'transformers'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_example_of_tinker_learns() -> None:
    rewards = runpy.run_path(str(REPO / "examples/in_tinker/train.py"))["train"]()
    assert sum(rewards[:3]) / 3 < 0.6 and sum(rewards[-3:]) / 3 > 0.8
