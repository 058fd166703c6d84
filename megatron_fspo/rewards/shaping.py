"""What is added to a verdict for the shape of a response: its format and its length."""

from __future__ import annotations

from megatron_fspo.rewards.extract import extract
from megatron_fspo.rewards.normalise import canonical
from megatron_fspo.rewards.part import Outcome
from megatron_fspo.rewards.verdict import Request


class Format:
    """The reward ``format``: 1 if there is an answer where ``reward.extract`` looks for it, else 0."""

    name = "format"

    def __init__(self, *, extract: str) -> None:
        self._extract = extract

    def grade(self, request: Request) -> Outcome:
        found = extract(request.response, self._extract)
        if found is None:
            return Outcome(value=0.0, parsed=False)
        return Outcome(value=1.0, answer=canonical(found))

    def close(self) -> None:
        """It has started nothing."""


def overlong(length: int, *, longest: int, tokens: int, penalty: float) -> float:
    """DAPO's soft overlong punishment: 0 up to ``longest - tokens``, then linearly down to ``-penalty``.

    Args:
        length: tokens of the response.
        longest: ``rollout.max_response_tokens``.
        tokens: ``reward.overlong_tokens``; 0: no penalty.
        penalty: ``reward.overlong_penalty``.
    """
    over = length - (longest - tokens)
    return -penalty * min(over / tokens, 1.0) if tokens and over > 0 else 0.0
