"""Rewards for the shape of a response: its format and its length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards.extract import extract
from megatron_fspo.rewards.grade import Grade, GradeRequest
from megatron_fspo.rewards.normalise import canonical

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # at run time it would bring torch to the worker processes


class Format:
    """The reward ``format``: 1 if there is an answer where ``reward.extract`` looks for it, else 0."""

    def __init__(self, config: Reward, loop: Loop) -> None:
        self._extract = config.extract

    def grade(self, request: GradeRequest) -> Grade:
        answer = extract(request.response, self._extract)
        if answer is None:
            return Grade(score=0.0, parsed=False)
        return Grade(score=1.0, answer=canonical(answer))

    def close(self) -> None:
        """Do nothing: it has started nothing."""


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
