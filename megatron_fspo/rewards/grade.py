"""The grade of a response, or the failure of a reward to give one.

Rewards are user code: their errors become a :class:`Failure`, which names the response.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from megatron_fspo.job.remote import Loop, one_line
from megatron_fspo.rewards.extract import extract
from megatron_fspo.rewards.normalise import canonical, form
from megatron_fspo.rewards.registry import AnyReward
from megatron_fspo.types import Completion, Prompt

LARGEST = 1e6
"""Largest absolute reward: sums and squares over a rollout stay accurate enough in fp32."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Grade of a response, by one reward or by all rewards of a run."""

    score: float
    """Number from the (first) reward alone; the basis of accuracy."""
    answer: str | None = None
    """Answer in canonical form, for majority votes; None if there is none."""
    parsed: bool = True
    """True if the response has an answer that could be parsed."""
    timed_out: bool = False
    """True if a score is 0 because a worker exceeded its limit on time, CPU time, memory or recursion."""
    tier: int = 0
    """For ``math``: 1 if graded without algebra, 2 with it."""
    reward: float = math.nan
    """Weighted sum of all rewards minus the length penalty, for training. NaN in the grade of one reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted scores of the further rewards; ``overlong`` if there is a length penalty."""


@dataclass(frozen=True)
class GradeRequest:
    """A response to grade, with its prompt."""

    prompt: Prompt
    completion: Completion
    response: str
    final: str = ""
    """What follows the response's thinking, where its answer is."""

    def failure(self, problem: str, error: BaseException | None = None) -> Failure:
        """Return a failure of this request, with the traceback of ``error``."""
        lines = "".join(traceback.format_exception(error)).splitlines() if error is not None else []
        return Failure(self.prompt, self.completion, self.response, problem=problem, traceback=tuple(lines))

    def raised(self, error: BaseException) -> Failure:
        """Return the failure for an exception of the reward."""
        described = one_line(f"{type(error).__name__}: {error}").removesuffix(":")
        frames = traceback.extract_tb(error.__traceback__)
        theirs = frames and Path(frames[-1].filename).parent != Path(__file__).parent  # else our call raised
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if theirs else ""
        return self.failure(f"raised {described}{where}", error)

    def number(self, value: object) -> float | Failure:
        """Convert a reward's return value (number, bool, array or tensor of one number) to a float."""
        number = math.nan
        if isinstance(value, SupportsFloat):  # not text, which ``float`` would parse
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
    """A response for which the reward gave no usable number."""

    problem: str
    """One line: the exception with its file and line, or the value that the reward returned."""
    traceback: tuple[str, ...] = ()
    """Lines of the traceback; empty if the reward returned."""

    def evidence(self) -> dict[str, Any]:
        """Return the failure as JSON types, with the field names of ``samples.jsonl``."""
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
        """Return the grade or a future of it. Does not block; thread-safe."""

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Release resources."""


class Function(Verifier):
    """A reward that is a function. ``extract`` is the rule for the answer that majority votes count
    (``reward.extract``). A plain function runs in threads of ``loop``, or in the calling thread if that is
    None; an ``async`` one, and what a plain one returns to be awaited, on ``loop``."""

    def __init__(self, reward: AnyReward, extract: str, loop: Loop | None) -> None:
        self._reward, self._extract, self._loop = reward, extract, loop
        self._is_async = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))

    def grade(self, request: GradeRequest) -> GradeOrFailure | Future[GradeOrFailure]:
        return self._call(request) if self._loop is None else self._loop.submit(self.graded(request))

    async def graded(self, request: GradeRequest) -> GradeOrFailure:
        """Return the grade. Runs on the loop."""
        try:
            in_threads = asyncio.get_running_loop().run_in_executor
            value = self._call(request) if self._is_async else await in_threads(None, self._call, request)
            return self._make_grade(await value, request) if inspect.isawaitable(value) else value
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # we are closing; the reward did not raise it
                raise
            return request.raised(error)

    def _call(self, request: GradeRequest) -> Any:
        """Return the grade, or what the function returned to be awaited."""
        try:
            value = self._reward(request.prompt, request.completion, request.response)
            return value if inspect.isawaitable(value) else self._make_grade(value, request)
        except BaseException as error:
            return request.raised(error)

    def _make_grade(self, value: object, request: GradeRequest) -> GradeOrFailure:
        score = request.number(value)
        if isinstance(score, Failure):
            return score
        answer = extract(request.final, self._extract)
        return Grade(score=score, answer=None if answer is None else canonical(form(answer)))


def outcome(grade: GradeOrFailure | Future[GradeOrFailure], request: GradeRequest) -> GradeOrFailure:
    """Return the grade of a verifier's answer; its exception becomes a failure."""
    try:
        return grade.result() if isinstance(grade, Future) else grade
    except (Exception, SystemExit, CancelledError) as error:  # would be lost otherwise
        return request.raised(error)
