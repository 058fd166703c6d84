"""Rewards that are functions in this process: plain ones run in threads, ``async`` ones on an event loop.

Grading does not block its caller, so it overlaps with sampling. Functions that wait (for a network, a file, a
judge) are called for many responses at a time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards.extract import extract
from megatron_fspo.rewards.grade import Failure, Grade, GradeOrFailure, GradeRequest, Verifier
from megatron_fspo.rewards.normalise import canonical, form
from megatron_fspo.rewards.pool import Threads
from megatron_fspo.rewards.registry import AnyReward

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # not at run time: it would import torch in workers


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
