"""The plainest verifier: the response is the answer."""

from __future__ import annotations

from megatron_fspo.rewards.registry import register
from megatron_fspo.types import Completion, Prompt


@register("exact_match")
def exact_match(prompt: Prompt, completion: Completion, response: str) -> float:
    """1.0 if the response is the answer, white space at both ends aside, else 0.0."""
    return float(response.strip() == prompt.answer.strip())
