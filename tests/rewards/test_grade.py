"""What a reward may return, and what is said of one that does something else."""

from __future__ import annotations

import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards import Failure, Grade, Reward
from megatron_fspo.rewards.grade import Function, GradeRequest
from megatron_fspo.types import Completion, Prompt

PROMPT = Prompt(index=7, token_ids=(10, 3), text="^3=", answer="3")
COMPLETION = Completion(token_ids=(4, 12), log_probs=(-0.1, -0.2), finish_reason="stop", weight_version=5)


def number_of(reward: Reward) -> float | Failure:
    """What comes of a reward's call."""
    request = GradeRequest(PROMPT, COMPLETION, "4")
    with Loop("rewards") as loop:
        found = loop.run(Function(reward, "whole", loop).graded(request))
    return found.score if isinstance(found, Grade) else found


def returned(value: Any) -> float | Failure:
    return number_of(lambda prompt, completion, response: value)


def test_a_finite_number_of_any_type_is_a_reward() -> None:
    half = (Fraction(1, 2), np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5]))
    plain = [(0, 0.0), (True, 1.0), (np.bool_(True), 1.0), (-2.5, -2.5), (1e6, 1e6), (-(10**6), -1e6)]
    for value, number in [*plain, *((value, 0.5) for value in half)]:
        found = returned(value)
        assert type(found) is float and found == number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((value, str(value)) for value in (None, math.nan, -math.inf, (1.0, "why"), {"score": 1}, 1j)),
        (torch.tensor(math.nan), "tensor(nan)"),
        (torch.ones(2), "tensor([1., 1.])"),
        ("1.0", "'1.0'"),
        (10**400, "1000"),
        ("x" * 10_000, "'xxx"),
    ],
)
def test_anything_else_is_a_failure_that_shows_it(value: Any, shown: str) -> None:
    found = returned(value)
    assert isinstance(found, Failure) and found.problem.startswith(f"returned {shown}")
    assert found.problem.endswith(" instead of a finite number")
    assert len(found.problem) < 100 and not found.traceback


@pytest.mark.parametrize("value", [1e308, -1e308, 1_000_001, np.float32(2e6)])
def test_what_is_finite_and_too_large_is_a_failure(value: Any) -> None:
    found = returned(value)
    assert isinstance(found, Failure) and found.problem.endswith("from -1e+06 to 1e+06")


def test_an_exception_is_told_with_its_place_and_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "mine_for_grade.py"
    source.write_text(
        "def reward(prompt, completion, response):\n"
        "    return parsed(response)\n"
        "def parsed(response):\n"
        "    raise ValueError('no answer\\nin sight')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import mine_for_grade  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "mine_for_grade")
    found = number_of(mine_for_grade.reward)
    assert isinstance(found, Failure)
    assert found.problem == f"raised ValueError: no answer in sight ({source}:4)"
    evidence = json.loads(json.dumps(found.evidence()))
    trace = "\n".join(evidence.pop("traceback"))
    assert "return parsed(response)" in trace and trace.endswith("ValueError: no answer\nin sight")
    assert evidence == {
        "problem": found.problem,
        "prompt_index": 7,
        "prompt": "^3=",
        "response": "4",
        "answer": "3",
        "finish_reason": "stop",
        "weight_version": 5,
        "prompt_token_ids": [10, 3],
        "token_ids": [4, 12],
    }


def test_a_reward_of_other_arguments_and_one_that_exits_are_failures_too() -> None:
    wrong: Any = lambda prompt: 1.0  # noqa: E731
    found = number_of(wrong)
    assert isinstance(found, Failure) and "takes 1 positional argument but 3 were given" in found.problem
    assert ".py:" not in found.problem  # ours is no place to look

    def leaves(prompt: Prompt, completion: Completion, response: str) -> float:
        sys.exit(0)

    found = number_of(leaves)
    assert isinstance(found, Failure) and found.problem.startswith("raised SystemExit: 0 (")
