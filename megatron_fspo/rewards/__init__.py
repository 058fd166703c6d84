"""Verifiers: one number per completion. Importing this package registers the built-in ones."""

from megatron_fspo.rewards import exact_match, make_sum
from megatron_fspo.rewards.registry import Reward, get_reward, register

__all__ = ["Reward", "exact_match", "get_reward", "make_sum", "register"]
