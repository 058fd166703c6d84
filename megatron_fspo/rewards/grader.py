"""Grades responses, for training, evaluation and ``data check``.

A run has one reward that defines accuracy (``reward.name``), and may add others with weights. All of them
grade concurrently, in the background, so grading overlaps with sampling. A user's functions run in a process
of their own. Those that wait (for a network, a file, a judge) are called for many responses at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_fspo.errors import Attempts, InputError
from megatron_fspo.job.remote import Loop, check_url
from megatron_fspo.rewards.extract import after_thinking, extract
from megatron_fspo.rewards.grade import (
    LARGEST,
    Failure,
    Function,
    Grade,
    GradeOrFailure,
    GradeRequest,
    Verifier,
    outcome,
)
from megatron_fspo.rewards.normalise import canonical, form
from megatron_fspo.rewards.process import Own, RewardProcess, standing
from megatron_fspo.rewards.registry import VERIFIERS, built_in, find_module, get_reward
from megatron_fspo.types import Completion, Prompt

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # not at run time: it would import torch in workers

CALLS = 1024  # default of ``reward.concurrency`` for functions
_METRICS: dict[str, Callable[[Grade], float]] = {
    "timeout_rate": lambda grade: grade.timed_out,
    "parse_fail_rate": lambda grade: not grade.parsed,
    "tier1": lambda grade: grade.tier == 1,
    "tier2": lambda grade: grade.tier == 2,
}


class Format(Verifier):
    """The reward ``format``: 1 if ``reward.extract`` yields an answer, else 0."""

    def __init__(self, config: Reward, loop: Loop) -> None:
        self._extract = config.extract

    def grade(self, request: GradeRequest) -> Grade:
        answer = extract(request.final, self._extract)
        if answer is None:
            return Grade(score=0.0, parsed=False)
        return Grade(score=1.0, answer=canonical(form(answer)))


class PendingGrade(Future[GradeOrFailure]):
    """Future of the grade of a response."""

    def __init__(self, request: GradeRequest, standing: Callable[[], list[str]]) -> None:
        super().__init__()
        self.request = request
        self.standing = standing  # of the grader
        self.by_reward: Mapping[str, GradeOrFailure | Future[GradeOrFailure]] = {}
        """Reward → its answer; ``reward.name`` is first."""

    def late(self) -> list[str]:
        """Return the names of rewards that have not answered yet."""
        return [name for name, task in self.by_reward.items() if isinstance(task, Future) and not task.done()]

    def missing(self, problem: str) -> Failure:
        """Return a failure of the first reward that has not answered yet."""
        names = list(self.by_reward)
        name = (self.late() or names)[0]
        return self.request.failure(problem if name == names[0] else f"with {name!r}: {problem}")


class Grader:
    """Grades many responses concurrently.

    Example::

        with Grader(config.reward, max_response_tokens=config.rollout.max_response_tokens) as grader:
            pending = [grader.submit(prompt, completion, text) for prompt, completion, text in batch]
            grades = [future.result() for future in pending]

    The length penalty reaches its maximum at ``max_response_tokens``. Raises as :func:`check_reward`.
    """

    def __init__(self, config: Reward, *, max_response_tokens: int) -> None:
        check_reward(config, max_response_tokens=max_response_tokens)
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._loop = Loop("async rewards", grace_seconds=2)
        concurrency = config.concurrency or CALLS
        self._lock = threading.Lock()
        self._pending: set[PendingGrade] = set()
        self._closed = False
        self._verifiers: dict[str, Verifier] = {}
        self._loop.loop.set_default_executor(ThreadPoolExecutor(concurrency))
        own = {name: find_module(name) for name in config.names if not (config.in_process or built_in(name))}
        self._process = RewardProcess(self._loop, own, config.extract, concurrency) if own else None
        try:
            for name in config.names:
                self._verifiers[name] = self._verifier(name)
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: Prompt, completion: Completion, response: str) -> PendingGrade:
        """Return a future of the grade of a response. Does not block; thread-safe.

        If a reward raises or returns no number, the result is a :class:`Failure`. A reward that exceeds a
        limit in a worker scores 0 and counts in ``reward/timeout_rate``. Raises ``RuntimeError`` if closed.
        """
        final = after_thinking(prompt.text, response, self._config.end_of_thinking)
        request = GradeRequest(prompt, completion, response, final)
        result = PendingGrade(request, self.standing)
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            self._pending.add(result)
        result.by_reward = {name: verifier.grade(request) for name, verifier in self._verifiers.items()}
        settle = partial(self._settle, result)
        settle()
        for task in result.by_reward.values():
            if isinstance(task, Future):
                task.add_done_callback(settle)
        return result

    def standing(self) -> list[str]:
        """Return the lines of code at which calls of a user's functions stand. May block for seconds."""
        return standing(self._loop.loop) if self._process is None else self._process.standing()

    def close(self) -> None:
        """Cancel pending grades and release threads and workers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending, self._pending = self._pending, set()
        for future in pending:
            future.cancel()
        for verifier in self._verifiers.values():
            verifier.close()
        self._loop.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _verifier(self, name: str) -> Verifier:
        if name in VERIFIERS:
            module, _, factory = VERIFIERS[name].factory.partition(":")
            verifier: Verifier = getattr(importlib.import_module(module), factory)(self._config, self._loop)
            return verifier
        if built_in(name):
            return Function(get_reward(name), "whole", None)
        if self._process is not None:
            return Own(name, self._process)
        return Function(get_reward(name), self._config.extract, self._loop)

    def _settle(self, result: PendingGrade, _: object = None) -> None:
        """Set the grade once all rewards have answered."""
        if result.late():
            return
        request = result.request
        grade = self._sum({name: outcome(task, request) for name, task in result.by_reward.items()}, request)
        with self._lock:
            if result not in self._pending:  # settled by another thread, or closed
                return
            self._pending.remove(result)
        with suppress(InvalidStateError):  # the caller cancelled it
            result.set_result(grade)

    def _sum(self, by_reward: Mapping[str, GradeOrFailure], request: GradeRequest) -> GradeOrFailure:
        config = self._config
        for name, got in by_reward.items():
            if isinstance(got, Failure):
                return got if name == config.name else replace(got, problem=f"with {name!r}: {got.problem}")
        grades = {name: got for name, got in by_reward.items() if isinstance(got, Grade)}
        first = grades[config.name]
        parts = {name: grades[name].score for name in config.also}
        reward = config.weight * first.score + sum(config.also[name] * score for name, score in parts.items())
        if config.overlong_tokens:
            parts["overlong"] = overlong(
                request.completion.length,
                longest=self._max_response_tokens,
                tokens=config.overlong_tokens,
                penalty=config.overlong_penalty,
            )
            reward += parts["overlong"]
        if not abs(reward) <= LARGEST:
            return request.failure(f"with its weights: is {reward:g}, beyond ±{LARGEST:g}")
        return replace(
            first,
            parsed=all(grade.parsed for grade in grades.values()),
            timed_out=any(grade.timed_out for grade in grades.values()),
            tier=max(grade.tier for grade in grades.values()),
            reward=reward,
            parts=parts,
        )


def tally(config: Reward, grades: Iterable[Grade]) -> dict[str, tuple[float, float]]:
    """Return (sum, denominator) of each metric under ``reward/`` over ``grades``. Its names depend on the
    configuration only, so they are equal on all ranks."""
    grades, names = list(grades), (config.name, *config.also)
    mine = {metric for name in names if name in VERIFIERS for metric in VERIFIERS[name].metrics}
    values = {name: [of(grade) for grade in grades] for name, of in _METRICS.items() if name in mine}
    for name in (*config.also, *(["overlong"] if config.overlong_tokens else [])):
        values[f"{name}/mean"] = [grade.parts[name] for grade in grades]
    return {f"reward/{name}": (float(sum(numbers)), float(len(numbers))) for name, numbers in values.items()}


def overlong(length: int, *, longest: int, tokens: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment for a length in tokens: 0 up to ``longest - tokens``, then
    linear to ``-penalty`` at ``longest``. ``longest`` is ``rollout.max_response_tokens``, ``tokens`` is
    ``reward.overlong_tokens`` (0: no penalty), and ``penalty`` is ``reward.overlong_penalty``."""
    over = length - (longest - tokens)
    return -penalty * min(over / tokens, 1.0) if tokens and over > 0 else 0.0


def check_reward(config: Reward, *, max_response_tokens: int) -> None:
    """Check the ``reward`` section without starting anything. Raises ``InputError`` if keys conflict, a
    reward or package is missing, or a URL is invalid."""
    try:
        config.check(max_response_tokens=max_response_tokens)
    except ValueError as error:
        raise InputError(str(error)) from None
    attempt = Attempts()
    for name in config.names:
        if name not in VERIFIERS:
            attempt(partial(get_reward if config.in_process else find_module, name))
    attempt.end()
    for name in sorted(VERIFIERS.keys() & config.names):
        module, extra = VERIFIERS[name].package, VERIFIERS[name].extra
        if module and importlib.util.find_spec(module) is None:
            raise InputError(
                f"reward {name!r} needs the package {module.replace('_', '-')} of the extra {extra}: run "
                f"`pip install -e '.[{extra}]'` in a checkout of megatron_fspo"
            )
    if config.url is not None:
        check_url(config.url, "reward.url")
