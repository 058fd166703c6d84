"""Rewards: one number per completion. Importing this package is cheap and registers the built-in ones."""

from megatron_fspo.rewards import make_sum
from megatron_fspo.rewards.grade import Failure, Grade
from megatron_fspo.rewards.grader import Grader, PendingGrade, check_reward, tally
from megatron_fspo.rewards.registry import Reward, exact_match, get_reward, register

__all__ = [
    "Failure", "Grade", "Grader", "PendingGrade", "Reward", "check_reward", "exact_match", "get_reward",
    "make_sum", "register", "tally",
]  # fmt: skip
