"""What length, form and end of a response add to its verdict."""

from __future__ import annotations

import pytest
from answers import STOPPED, prompt

from megatron_fspo.config import Reward
from megatron_fspo.rewards import Grade, Grader
from megatron_fspo.rewards.shaping import overlong


def test_dapos_soft_overlong_punishment() -> None:
    """Their setting: 20,480 tokens, the last 4,096 of them punished, up to 1."""

    def penalty(length: int) -> float:
        return overlong(length, longest=20_480, tokens=4096, penalty=1.0)

    assert [penalty(length) for length in (1, 16_384, 17_408, 18_432, 20_480)] == [0, 0, -0.25, -0.5, -1]
    assert penalty(30_000) == -1.0, "never more than that"


def test_no_penalty_and_one_from_the_first_token_on() -> None:
    assert overlong(100, longest=100, tokens=0, penalty=1.0) == 0.0
    assert overlong(1, longest=100, tokens=100, penalty=2.0) == pytest.approx(-0.02)


@pytest.mark.parametrize(("response", "value"), [("\\boxed{}", 0.0), ("\\boxed{5}", 1.0), ("5", 0.0)])
def test_format(response: str, value: float) -> None:
    with Grader(Reward(name="format"), max_response_tokens=9) as grader:
        grade = grader.submit(prompt("6"), STOPPED, response).result()
    assert isinstance(grade, Grade) and (grade.score, grade.parsed) == (value, bool(value))
