"""The loss that a surrogate gives: what a first user writes."""

from __future__ import annotations

import pytest
import torch

from megatron_fspo.objective import FSPOBand, sequence_surrogate


def test_its_gradient_is_the_weight() -> None:
    log_ratio_sum = torch.tensor([0.1, 2.0, -0.3], dtype=torch.float64, requires_grad=True)
    lengths, advantages = torch.tensor([4, 9, 5]), torch.tensor([1.0, 1.0, -1.0]).double()
    surrogate = sequence_surrogate(log_ratio_sum, lengths, advantages, FSPOBand(c_low=0.2, c_high=0.2))
    surrogate.loss(log_ratio_sum, total=6).backward()
    assert log_ratio_sum.grad is not None
    torch.testing.assert_close(log_ratio_sum.grad, -surrogate.weight / 6)
    assert surrogate.weight[1] == 0


def test_what_is_not_finite_is_warned_of_and_has_no_gradient() -> None:
    log_ratio_sum = torch.tensor([0.1, torch.nan], requires_grad=True)
    surrogate = sequence_surrogate(
        log_ratio_sum, torch.tensor([4, 9]), torch.ones(2), FSPOBand(c_low=0.2, c_high=0.2)
    )
    with pytest.warns(UserWarning, match="1 of 2 sequences are not finite"):
        loss = surrogate.loss(log_ratio_sum)
    loss.backward()
    assert log_ratio_sum.grad is not None and log_ratio_sum.grad[1] == 0 and loss.isfinite()
