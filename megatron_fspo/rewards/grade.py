"""The grade of a response, and what stands in its place where a reward gave none.

A reward is a user's code: what it does wrong becomes a :class:`Failure` that says for which response.
"""

from __future__ import annotations

import math
import reprlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsFloat

from megatron_fspo.types import Completion, Prompt

LARGEST = 1e6
"""Largest size of a reward: sums and squares of as many as there are stay exact enough in fp32."""


class Interrupted(BaseException):
    """Raised within a call of a reward that took too long."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """A response's grade: by one reward, or by all of a run.

    Example::

        Grade(reward=1.05, score=1.0, answer="1/2", parts={"format": 1.0}, tier=1)
    """

    score: float
    """The (first) reward's number alone: what accuracy is made of."""
    answer: str | None = None
    """The answer in the form that equal ones share, for majority votes; None where there is none."""
    parsed: bool = True
    """There was an answer where it should be, and it could be read."""
    timed_out: bool = False
    """A number in it is 0 because a worker was killed: over its time, its CPU time or its memory."""
    tier: int = 0
    """For ``math``: 1 without algebra, 2 with it."""
    reward: float = math.nan
    """Learned from: the weighted sum of all rewards, less the penalty on length. NaN by one reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The further rewards' scores, without their weights; ``overlong``, if there is a penalty on length."""


@dataclass(frozen=True)
class GradeRequest:
    """A response to grade, with its prompt."""

    prompt: Prompt
    completion: Completion
    response: str

    def failure(self, problem: str, error: BaseException | None = None) -> Failure:
        """Return that the reward gave no grade, with the traceback of ``error``."""
        lines = "".join(traceback.format_exception(error)).splitlines() if error is not None else []
        return Failure(self.prompt, self.completion, self.response, problem=problem, traceback=tuple(lines))

    def raised(self, error: BaseException) -> Failure:
        """Return that the reward gave no grade, as it raised, or took too long."""
        if isinstance(error, Interrupted):
            return replace(self.failure(f"was interrupted{_line_of(error)}", error), interrupted=True)
        described = one_line(f"{type(error).__name__}: {error}").removesuffix(":")
        return self.failure(f"raised {described}{_line_of(error)}", error)

    def number(self, value: object) -> float | Failure:
        """Return the number that a reward returned (or a bool, or an array or tensor of one number)."""
        number = math.nan
        if isinstance(value, SupportsFloat):  # text is none: ``float`` would read it
            with suppress(Exception):
                number = float(value)
        if not abs(number) <= LARGEST:
            wanted = (
                f"a number from {-LARGEST:g} to {LARGEST:g}" if math.isfinite(number) else "a finite number"
            )
            return self.failure(f"returned {one_line(reprlib.repr(value))} instead of {wanted}")
        return number


@dataclass(frozen=True, kw_only=True)
class Failure(GradeRequest):
    """A response for which the reward gave no number that can be learned from."""

    problem: str
    """One line: the exception with its file and line, or the value that the reward returned."""
    traceback: tuple[str, ...] = ()
    """Its lines; empty where the reward returned."""
    interrupted: bool = False
    """It took too long, and was ended."""

    def evidence(self) -> dict[str, Any]:
        """Return all of it as JSON types, with the names of ``samples.jsonl``."""
        return {
            "problem": self.problem,
            "traceback": list(self.traceback),
            "prompt_index": self.prompt.index,
            "prompt": self.prompt.text,
            "response": self.response,
            "answer": self.prompt.answer,
            "finish_reason": self.completion.finish_reason,
            "weight_version": self.completion.weight_version,
            "prompt_token_ids": list(self.prompt.token_ids),
            "token_ids": list(self.completion.token_ids),
        }


GradeOrFailure = Grade | Failure


class Verifier(ABC):
    """One reward of a run."""

    @abstractmethod
    def grade(self, request: GradeRequest) -> GradeOrFailure | Future[GradeOrFailure]:
        """Return the grade, or the one to come. Does not wait for it; any thread may ask."""

    def close(self) -> None:  # noqa: B027  most have started nothing
        """End what it started."""


def outcome(one: GradeOrFailure | Future[GradeOrFailure], request: GradeRequest) -> GradeOrFailure:
    """Return what a verifier's answer holds; what it raised is a failure."""
    try:
        return one.result() if isinstance(one, Future) else one
    except (Exception, SystemExit, CancelledError, Interrupted) as error:  # else nobody ever hears of it
        return request.raised(error)


def one_line(text: str, limit: int = 300) -> str:
    """Return the text without line breaks, cut after ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}…"


def _line_of(error: BaseException) -> str:
    """Return file and line of the reward that raised, in brackets; none where our call of it did."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = frames and Path(frames[-1].filename).parent != Path(__file__).parent
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if theirs else ""
