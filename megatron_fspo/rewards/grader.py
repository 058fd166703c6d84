"""Grades responses, for training, evaluation and ``data check``.

A run has one reward that defines accuracy (``reward.name``), and may add others with weights. All of them
grade concurrently, in the background, so grading overlaps with sampling. Plain functions run in threads of
this process, ``async`` ones on an event loop: those that wait (for a network, a file, a judge) are called for
many responses at a time.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError, wait
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
    Grade,
    GradeOrFailure,
    GradeRequest,
    Verifier,
    outcome,
)
from megatron_fspo.rewards.normalise import canonical, form
from megatron_fspo.rewards.pool import Threads
from megatron_fspo.rewards.registry import VERIFIERS, AnyReward, get_reward
from megatron_fspo.types import Completion, Prompt

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # not at run time: it would import torch in workers

CALLS = 1024
"""Default of ``reward.concurrency`` for functions."""
_METRICS: dict[str, Callable[[Grade], float]] = {
    "timeout_rate": lambda grade: grade.timed_out,
    "parse_fail_rate": lambda grade: not grade.parsed,
    "tier1": lambda grade: grade.tier == 1,
    "tier2": lambda grade: grade.tier == 2,
}


class Function(Verifier):
    """A reward that is a function; its exceptions are set on the future. ``extract`` is the rule for the
    answer that majority votes count (``reward.extract``). A plain function runs in ``threads``, or in the
    calling thread if that is None; an ``async`` one on ``loop``."""

    def __init__(self, reward: AnyReward, *, extract: str, threads: Threads | None, loop: Loop) -> None:
        self._reward = reward
        self._extract = extract
        self._threads = threads
        self._loop = loop
        self._is_async = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))

    def grade(self, request: GradeRequest) -> GradeOrFailure | Future[GradeOrFailure]:
        call = partial(self._reward, request.prompt, request.completion, request.response)
        if self._is_async:
            return self._loop.submit(self._awaited(call, request))
        if self._threads is None:
            return self._grade_of(call(), request)
        return self._threads.submit(partial(self._called, call, request))

    def _called(self, call: Callable[[], object], request: GradeRequest) -> GradeOrFailure:
        value = call()
        if inspect.isawaitable(value):
            work = self._loop.submit(self._awaited(lambda: value, request))
            try:
                while not work.done():  # an interrupt is raised between two waits
                    wait([work], timeout=0.1)
                return work.result()
            finally:
                work.cancel()
        return self._grade_of(value, request)

    async def _awaited(self, call: Callable[[], object], request: GradeRequest) -> GradeOrFailure:
        try:
            value = call()
            return self._grade_of(await value if inspect.isawaitable(value) else value, request)
        except (SystemExit, asyncio.CancelledError) as error:  # either would look like the end of the loop
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # we are closing; the reward did not raise it
                raise
            return request.raised(error)

    def _grade_of(self, value: object, request: GradeRequest) -> GradeOrFailure:
        score = request.number(value)
        if isinstance(score, Failure):
            return score
        answer = extract(request.final, self._extract)
        return Grade(score=score, answer=None if answer is None else canonical(form(answer)))


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

    def __init__(self, request: GradeRequest) -> None:
        super().__init__()
        self.request = request
        self.by_reward: Mapping[str, GradeOrFailure | Future[GradeOrFailure]] = {}
        """Reward → its answer; ``reward.name`` is first."""

    def late(self) -> list[str]:
        """Return the names of rewards that have not answered yet."""
        return [name for name, one in self.by_reward.items() if isinstance(one, Future) and not one.done()]

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
            grades = [one.result() for one in pending]

    The length penalty reaches its maximum at ``max_response_tokens``. Raises as :func:`check_reward`.
    """

    def __init__(self, config: Reward, *, max_response_tokens: int) -> None:
        check_reward(config, max_response_tokens=max_response_tokens)
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._loop = Loop("async rewards", grace_seconds=2)
        self._threads = Threads(config.concurrency or CALLS)
        self._lock = threading.Lock()
        self._pending: set[PendingGrade] = set()
        self.closed = threading.Event()
        self._verifiers: dict[str, Verifier] = {}
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
        result = PendingGrade(request)
        with self._lock:
            if self.closed.is_set():
                raise RuntimeError("the grader is closed")
            self._pending.add(result)
        result.by_reward = {name: one.grade(request) for name, one in self._verifiers.items()}
        settle = partial(self._settle, result)
        settle()
        for one in result.by_reward.values():
            if isinstance(one, Future):
                one.add_done_callback(settle)
        return result

    def interrupt(self, seconds: float) -> None:
        """Interrupt calls of plain functions that have run for more than ``seconds``. Their grades are
        failures. If there was one, no further call starts."""
        self._threads.interrupt(seconds)

    def close(self) -> None:
        """Cancel pending grades and release threads and workers. Idempotent."""
        with self._lock:
            if self.closed.is_set():
                return
            self.closed.set()
            pending, self._pending = self._pending, set()
        for future in pending:
            future.cancel()
        for verifier in self._verifiers.values():
            verifier.close()
        self._threads.close()
        self._threads.interrupt(-1)
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
        reward = get_reward(name)
        ours = ":" not in name and reward.__module__.startswith("megatron_fspo.")
        return Function(
            reward,
            extract="whole" if ours else self._config.extract,  # ours read the whole response
            threads=None if ours else self._threads,
            loop=self._loop,
        )

    def _settle(self, result: PendingGrade, _: object = None) -> None:
        """Set the grade once all rewards have answered."""
        if result.late():
            return
        request = result.request
        grade = self._sum({name: outcome(one, request) for name, one in result.by_reward.items()}, request)
        with self._lock:
            if result not in self._pending:  # settled by another thread, or closed
                return
            self._pending.remove(result)
        with suppress(InvalidStateError):  # the caller cancelled it
            result.set_result(grade)

    def _sum(self, by_reward: Mapping[str, GradeOrFailure], request: GradeRequest) -> GradeOrFailure:
        config = self._config
        for name, one in by_reward.items():
            if isinstance(one, Failure):
                return one if name == config.name else replace(one, problem=f"with {name!r}: {one.problem}")
        grades = {name: one for name, one in by_reward.items() if isinstance(one, Grade)}
        first = grades[config.name]
        parts = {name: grades[name].score for name in config.also}
        reward = config.weight * first.score + sum(config.also[name] * one for name, one in parts.items())
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
            parsed=all(one.parsed for one in grades.values()),
            timed_out=any(one.timed_out for one in grades.values()),
            tier=max(one.tier for one in grades.values()),
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
    return {f"reward/{name}": (float(sum(some)), float(len(some))) for name, some in values.items()}


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
            attempt(partial(get_reward, name))
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
