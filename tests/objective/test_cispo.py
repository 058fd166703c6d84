"""CISPO's weights, against autograd of the loss as the paper writes it."""

from __future__ import annotations

import pytest
import torch
from test_policy import LENGTHS, inputs

from megatron_fspo.losses.cispo import CISPO, CISPOLoss


@pytest.mark.parametrize("eps_low", [None, 0.03])
def test_every_token_has_the_gradient_of_its_clipped_ratio_times_log_pi(eps_low: float | None) -> None:
    for seed in range(3):
        batch = inputs(LENGTHS, seed)
        log_probs = batch.log_ratio.clone().requires_grad_()  # log π, up to a constant
        ratio = batch.log_ratio.exp().clamp(None if eps_low is None else 1 - eps_low, 1.04)
        advantages = torch.cat([batch.advantages, torch.zeros(1)])[batch.segment]
        tokens = torch.where(batch.mask, ratio.detach() * advantages * log_probs, 0.0)
        (tokens.sum() / batch.num_tokens).backward()

        terms = CISPO(eps_low=eps_low, eps_high=0.04)(batch)
        assert log_probs.grad is not None
        want = torch.where(batch.mask, log_probs.grad, 0.0) * batch.num_sequences
        torch.testing.assert_close(terms.weight, want, rtol=1e-12, atol=1e-15)
        assert terms.clipped_high.any() and bool(terms.clipped_low.any()) == (eps_low is not None)
        # What is clipped keeps its gradient.
        assert (terms.weight[batch.mask] != 0).all()
        assert terms.ratio.isnan().all(), "tokens have weights of their own"


def test_a_token_that_is_not_finite_drops_its_sequence() -> None:
    batch = inputs([3, 2])
    batch.log_ratio[batch.mask.nonzero()[1]] = float("nan")
    terms = CISPO(eps_low=None, eps_high=0.04)(batch)
    assert terms.nonfinite.tolist() == [True, False]
    assert not terms.weight[batch.segment == 0].any() and terms.weight[batch.segment == 1].any()
    assert torch.isfinite(terms.objective)


def test_the_section_says_what_it_builds() -> None:
    assert CISPOLoss(eps_high=4.0).objective() == CISPO(eps_low=None, eps_high=4.0)
