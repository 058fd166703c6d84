"""The one way to a verdict, for training, evaluation and ``data check``.

A run has one reward that says what is right (``reward.name``), and may have others that are added with
weights. All of them grade at the same time, while the caller goes on.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_fspo.errors import Attempts, InputError
from megatron_fspo.remote import Loop
from megatron_fspo.rewards.functions import Function, Quick, Threads
from megatron_fspo.rewards.part import Answer, Outcome, Part
from megatron_fspo.rewards.registry import GRADED, get_reward
from megatron_fspo.rewards.shaping import Format, overlong
from megatron_fspo.rewards.verdict import LARGEST, Failure, Interrupted, Request
from megatron_fspo.types import Completion, Prompt

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # at run time it would bring torch to the worker processes

CALLS = 1024
"""``reward.concurrency`` of functions, where the configuration says none."""
REQUESTS = 64
"""The same of HTTP requests."""
_BUILT_IN = "megatron_fspo."


@dataclass(frozen=True, kw_only=True)
class Graded:
    """A response with its verdict.

    Example::

        Graded(reward=1.05, score=1.0, answer="1/2", parts={"format": 1.0}, tier=1)
    """

    reward: float
    """What is learned from: the weighted sum of all rewards, less the penalty on length."""
    score: float
    """The first reward's verdict alone: what accuracy is made of."""
    answer: str | None
    """The answer in the form that equal ones share, for majority votes; None where none was found."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The further rewards' verdicts, without their weights; ``overlong``, if there is a penalty on length."""
    timed_out: bool = False
    """A verdict in it is 0 because it hit a limit."""
    parsed: bool = True
    """There was an answer where it should be, and it could be read."""
    tier: int = 0
    """Of ``math``: 1 without algebra, 2 with it."""


class Verdict(Future["Graded | Failure"]):
    """The verdict on a response, to come."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._request = request
        self.answers: Mapping[str, Answer] = {}
        """Of each reward by its name, the first one first."""

    def missing(self, problem: str) -> Failure:
        """That of the first reward that has not answered, as a failure."""
        names = list(self.answers)
        late = [name for name, one in self.answers.items() if isinstance(one, Future) and not one.done()]
        return _of_reward(self._request.failure(problem), (late or names)[0], names[0])


class Grader:
    """Verdicts on responses, many at a time.

    Example::

        with Grader(config.reward, max_response_tokens=config.rollout.max_response_tokens) as grader:
            futures = [grader.submit(prompt, completion, text) for prompt, completion, text in batch]
            graded = [future.result() for future in futures]

    Args:
        config: the section ``reward``.
        max_response_tokens: where the penalty on length is full.

    Raises:
        InputError: as of :func:`check_reward`.
    """

    def __init__(self, config: Reward, *, max_response_tokens: int) -> None:
        check_reward(config, max_response_tokens=max_response_tokens)
        self._config = config
        self._names = config.names
        self._adds = bool(config.also or config.overlong_tokens)
        self._max_response_tokens = max_response_tokens
        self._loop = Loop("async rewards", grace_seconds=2)
        self._threads = Threads(config.concurrency or CALLS)
        self._lock = threading.Lock()
        self._waiting: set[Verdict] = set()
        self.closed = threading.Event()
        self._parts: list[Part] = []
        try:
            for name in self._names:
                self._parts.append(self._part(name))
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: Prompt, completion: Completion, response: str) -> Verdict:
        """The verdict on a response, to come. Never waits for it, and any thread may ask.

        A reward that raises, or returns no number, gives a :class:`Failure`. One that hits its limit in a
        worker counts as 0, and in ``reward/timeout_rate``.

        Raises:
            RuntimeError: the grader is closed.
        """
        request = Request(prompt, completion, response)
        result = Verdict(request)
        with self._lock:
            if self.closed.is_set():
                raise RuntimeError("the grader is closed")
            self._waiting.add(result)
        answers = [part.grade(request) for part in self._parts]
        result.answers = dict(zip(self._names, answers, strict=True))
        futures = [answer for answer in answers if isinstance(answer, Future)]
        if futures:
            _when_done(futures, lambda: self._settle(result, request, answers))
        else:
            self._settle(result, request, answers)
        return result

    def interrupt(self, seconds: float) -> None:
        """End calls of plain functions that have run for longer; their verdicts are failures, and no other
        call begins."""
        self._threads.interrupt(seconds)

    def close(self) -> None:
        """Cancel what is not graded, and end all that grades. A second call does nothing."""
        with self._lock:
            if self.closed.is_set():
                return
            self.closed.set()
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            future.cancel()
        for part in self._parts:
            part.close()
        self._threads.close()
        self._loop.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _part(self, name: str) -> Part:
        config = self._config
        pool = {"workers": config.workers, "seconds": config.seconds, "memory_gb": config.memory_gb}
        if name == "math":
            from megatron_fspo.rewards.math import Mathematics

            return Mathematics(extract=config.extract, **pool)  # type: ignore[arg-type]
        if name == "reasoning_gym":
            from megatron_fspo.rewards.gym import ReasoningGym

            return ReasoningGym(extract=config.extract, **pool)  # type: ignore[arg-type]
        if name == "http":
            from megatron_fspo.rewards.remote import Remote

            assert config.url is not None
            return Remote(
                config.url,
                seconds=config.seconds,
                retries=config.retries,
                concurrency=config.concurrency or REQUESTS,
                loop=self._loop,
            )
        if name == "format":
            return Format(extract=config.extract)
        reward = get_reward(name)
        if ":" not in name and reward.__module__.startswith(_BUILT_IN):
            return Quick(name, reward, extract="whole")  # which is what they read
        return Function(name, reward, extract=config.extract, threads=self._threads, loop=self._loop)

    def _settle(self, result: Verdict, request: Request, answers: Sequence[Answer]) -> None:
        """All answers are there."""
        graded = self._graded(request, [_outcome(request, answer) for answer in answers])
        with self._lock:
            if result not in self._waiting:  # closed meanwhile
                return
            self._waiting.remove(result)
        with suppress(InvalidStateError):  # the caller cancelled it
            result.set_result(graded)

    def _graded(self, request: Request, outcomes: Sequence[Outcome | Failure]) -> Graded | Failure:
        config = self._config
        for name, outcome in zip(self._names, outcomes, strict=True):
            if isinstance(outcome, Failure):
                return _of_reward(outcome, name, config.name)
        first, *others = (outcome for outcome in outcomes if isinstance(outcome, Outcome))
        graded = Graded(
            reward=config.weight * first.value,
            score=first.value,
            answer=first.answer,
            timed_out=first.timed_out,
            parsed=first.parsed,
            tier=first.tier,
        )
        if self._adds:
            graded = self._with_others(graded, request, others)
        if not abs(graded.reward) <= LARGEST:
            return request.failure(f"with its weights: is {graded.reward:g}, more than ±{LARGEST:g}")
        return graded

    def _with_others(self, graded: Graded, request: Request, others: Sequence[Outcome]) -> Graded:
        config = self._config
        parts = {part.name: other.value for part, other in zip(self._parts[1:], others, strict=True)}
        reward = graded.reward + sum(config.also[name] * value for name, value in parts.items())
        if config.overlong_tokens:
            parts["overlong"] = overlong(
                len(request.completion.token_ids),
                longest=self._max_response_tokens,
                tokens=config.overlong_tokens,
                penalty=config.overlong_penalty,
            )
            reward += parts["overlong"]
        return replace(
            graded,
            reward=reward,
            parts=parts,
            timed_out=graded.timed_out or any(other.timed_out for other in others),
            parsed=graded.parsed and all(other.parsed for other in others),
            tier=max(graded.tier, *(other.tier for other in others), 0),
        )


def tally(config: Reward, verdicts: Iterable[Graded]) -> dict[str, tuple[float, float]]:
    """(sum, denominator) of each metric under ``reward/`` over some verdicts.

    The names depend on the configuration alone, so that they are the same on every rank.
    """
    found = list(verdicts)
    names = set(config.names)
    values: dict[str, list[float]] = {}
    if names & {"math", "reasoning_gym"}:
        values["timeout_rate"] = [one.timed_out for one in found]
    if names & {"math", "reasoning_gym", "format"}:
        values["parse_fail_rate"] = [not one.parsed for one in found]
    if "math" in names:
        values |= {f"tier{tier}": [one.tier == tier for one in found] for tier in (1, 2)}
    for name in (*config.also, *(["overlong"] if config.overlong_tokens else [])):
        values[f"{name}/mean"] = [one.parts[name] for one in found]
    return {f"reward/{name}": (float(sum(some)), float(len(some))) for name, some in values.items()}


def check_reward(config: Reward, *, max_response_tokens: int) -> None:
    """Whether a run can have these rewards, without starting anything.

    Raises:
        InputError: keys that do not agree, a reward or package that is not there, a bad URL.
    """
    try:
        config.check(max_response_tokens=max_response_tokens)
    except ValueError as error:
        raise InputError(str(error)) from None
    attempt = Attempts()
    for name in config.names:
        if name not in GRADED:
            attempt(partial(get_reward, name))
    attempt.end()
    for name, module, extra in (("math", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "gym")):
        if name in config.names and importlib.util.find_spec(module) is None:
            raise InputError(
                f"reward {name!r} needs the package {module.replace('_', '-')} of the extra {extra}: "
                f"`pip install -e '.[{extra}]'` in a checkout of megatron_fspo"
            )
    if config.url is not None:
        from megatron_fspo.rewards.remote import check_url

        check_url(config.url)


def _of_reward(failure: Failure, name: str, first: str) -> Failure:
    """The same, of a further reward with its name."""
    return failure if name == first else replace(failure, problem=f"with {name!r}: {failure.problem}")


def _when_done(futures: Sequence[Future[Outcome | Failure]], then: Callable[[], None]) -> None:
    """Call ``then`` when all are, in the thread of the last one."""
    left = len(futures)
    lock = threading.Lock()

    def one(_: Future[Outcome | Failure]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    for future in futures:
        future.add_done_callback(one)


def _outcome(request: Request, answer: Answer) -> Outcome | Failure:
    if not isinstance(answer, Future):
        return answer
    try:
        return answer.result()
    except Interrupted as error:
        return request.interrupted(error)
    except (Exception, CancelledError) as error:  # ours: a verdict that never comes would be waited for
        return request.raised(error)
