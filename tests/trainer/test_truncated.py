"""Responses that were cut off: what ``reward.truncated`` makes of their advantages, and of their group's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.trainer.advantages import compute_advantages

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, 1.0, 0.0]], dtype=torch.float64)
CUT = torch.tensor([[False, False, True, False], [True, False, True, True]])


def config(truncated: str, advantage: str = "leave_one_out") -> Config:
    words = ["--reward.truncated", truncated, "--loss.advantage", advantage]
    return load_config(REPO / "examples/make_sum/run.toml", words)


def test_zero_advantage_leaves_their_reward_in_the_mean() -> None:
    assert torch.equal(compute_advantages(config("keep"), REWARDS, CUT), leave_one_out_advantages(REWARDS))
    found = compute_advantages(config("zero_advantage"), REWARDS, CUT)
    assert torch.equal(found, torch.where(CUT, 0.0, leave_one_out_advantages(REWARDS)))


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_normalized"])
def test_dropped_they_count_nowhere(advantage: str) -> None:
    estimate = leave_one_out_advantages if advantage == "leave_one_out" else group_normalized_advantages
    found = compute_advantages(config("drop", advantage), REWARDS, CUT)
    assert torch.equal(found[0, [0, 1, 3]], estimate(REWARDS[:1, [0, 1, 3]])[0])
    assert found[0, 2] == 0
    assert torch.equal(found[1], torch.zeros(4, dtype=torch.float64)), "nothing to compare the last one with"


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.lists(
            st.tuples(
                st.lists(st.integers(0, 3), min_size=n, max_size=n),
                st.lists(st.booleans(), min_size=n, max_size=n),
            ),
            min_size=1,
            max_size=4,
        )
    ),
    st.sampled_from(["keep", "zero_advantage", "drop"]),
)
def test_advantages_of_a_group(groups: list[tuple[list[int], list[bool]]], truncated: str) -> None:
    """They are 0 for who teaches nothing; without a mask, and where some are dropped, they sum to 0."""
    rewards = torch.tensor([rewards for rewards, _ in groups], dtype=torch.float64)
    cut = torch.tensor([cut for _, cut in groups])
    found = compute_advantages(config(truncated), rewards, cut)
    assert found.shape == rewards.shape and found.isfinite().all()
    if truncated != "keep":
        assert not found[cut].any()
    if truncated != "zero_advantage":
        torch.testing.assert_close(found.sum(1), torch.zeros(len(found), dtype=torch.float64))
