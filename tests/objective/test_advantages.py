import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages

BOTH = pytest.mark.parametrize("advantages", [leave_one_out_advantages, group_normalized_advantages])


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = leave_one_out_advantages(rewards)
    for row in range(5):
        for column in range(6):
            others = [rewards[row, other].item() for other in range(6) if other != column]
            expected = rewards[row, column].item() - sum(others) / 5
            assert got[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_group_normalised_by_hand() -> None:
    # Mean 0.5, deviation with n − 1: √(4 · 0.25 / 3) = 0.577350.
    got = group_normalized_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]]))
    side = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert got[0].tolist() == pytest.approx([side, -side, -side, side])
    assert got[1].tolist() == [0.0] * 4
    wide = group_normalized_advantages(torch.tensor([[1.0, 0.0]]), eps=1.0)
    assert wide[0].tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1), -0.5 / (math.sqrt(0.5) + 1)])
    with pytest.raises(ValueError, match="eps must be above 0"):
        group_normalized_advantages(torch.zeros(1, 2), eps=0.0)


@BOTH
@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 17))
def test_equal_rewards_give_exactly_zero(advantages, value, size) -> None:
    assert torch.equal(advantages(torch.full((2, size), value)), torch.zeros(2, size))


@BOTH
def test_groups_do_not_see_each_other_and_sum_to_zero(advantages) -> None:
    rewards = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    got = advantages(rewards)
    assert got.sum(1).abs().max() < 1e-5
    torch.testing.assert_close(advantages(rewards[2:3]), got[2:3])
    torch.testing.assert_close(advantages(rewards + torch.arange(4.0)[:, None]), got, rtol=1e-4, atol=1e-5)


@BOTH
def test_dtypes(advantages) -> None:
    assert advantages(torch.tensor([[1, 0]])).dtype == torch.float32
    assert advantages(torch.tensor([[1.0, 0.0]]).bfloat16()).dtype == torch.float32
    assert advantages(torch.tensor([[1.0, 0.0]]).double()).dtype == torch.float64
    assert advantages(torch.zeros(0, 4)).shape == (0, 4)


@BOTH
def test_wrong_rewards_are_refused(advantages) -> None:
    with pytest.raises(ValueError, match=r"n >= 2 responses per prompt, got \[3, 1\]"):
        advantages(torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"got \[4\]"):
        advantages(torch.zeros(4))
    rewards = torch.zeros(3, 4)
    rewards[1, 2], rewards[2, 0] = math.nan, math.inf
    with pytest.raises(ValueError, match=r"rewards\[1, 2\] is nan, 2 of 12"):
        advantages(rewards)
