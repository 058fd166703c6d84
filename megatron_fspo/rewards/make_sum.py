"""The reward of the make-sum task (``examples/make_sum``)."""

from __future__ import annotations

from megatron_fspo.rewards.registry import register
from megatron_fspo.types import Completion, Prompt


def digits_sum_to(response: str, answer: str) -> bool:
    """Return True if ``response`` is groups of three digits whose first digits, 1–9, sum to ``answer``. The
    others are the policy's notes (the remainder, in the demonstrations), which are not graded."""
    if len(response) % 3 or not (response.isascii() and response.isdigit()):
        return False
    digits = response[::3]
    return "0" not in digits and str(sum(map(int, digits))) == answer


@register("make_sum")
def make_sum(prompt: Prompt, completion: Completion, response: str) -> float:
    """Return 1.0 if the policy stopped by itself and its digits sum to the answer, else 0.0."""
    return float(completion.finish_reason == "stop" and digits_sum_to(response, prompt.answer))
