"""Verifiers: one number per completion. Importing this package registers the built-in ones, and is light."""

from megatron_fspo.rewards import exact_match, make_sum
from megatron_fspo.rewards.grader import Graded, Grader, Verdict, check_reward, tally
from megatron_fspo.rewards.registry import Reward, get_reward, register
from megatron_fspo.rewards.verdict import Failure, judge

__all__ = [
    "Failure",
    "Graded",
    "Grader",
    "Reward",
    "Verdict",
    "check_reward",
    "exact_match",
    "get_reward",
    "judge",
    "make_sum",
    "register",
    "tally",
]
