"""Rewards that are functions, in this process: plain ones in threads, ``async`` ones on an event loop.

Grading does not hold up whoever asks for it, so it goes on while responses are sampled, and a function that
waits (for a network, a file, a judge) is called for many responses at a time.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards.extract import extract
from megatron_fspo.rewards.grade import (
    Failure,
    Grade,
    GradeOrFailure,
    GradeRequest,
    Interrupted,
    awaited,
    called,
)
from megatron_fspo.rewards.normalise import canonical
from megatron_fspo.rewards.registry import AnyReward

T = TypeVar("T")


class Threads:
    """At most ``most`` calls at a time, each in a thread. Threads are started as they are needed.

    Those of ``concurrent.futures`` are no daemons: one call that never returns would keep the program from
    ending.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._running: dict[int, float] = {}  # thread → when its call began
        self._interrupted = False
        self._unfinished = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Return the call's result to come, or its error."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        with self._lock:
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._most):
                self._threads += 1
                threading.Thread(target=self._work, name="reward", daemon=True).start()
        return future

    def interrupt(self, seconds: float) -> None:
        """Raise :class:`Interrupted` in calls that have run for longer; after that no other call begins.

        A call that computes without end takes Python's lock for 5 ms at a time, from the thread that trains
        too. One that waits in C hears of it at the end of its wait.
        """
        with self._lock:  # so that none of them ends meanwhile
            for thread, began in self._running.items():
                if time.monotonic() - began > seconds:
                    self._interrupted = True
                    self._running[thread] = time.monotonic()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(Interrupted)
                    )

    def close(self) -> None:
        """Cancel what has not begun, interrupt what runs. Nobody waits for that."""
        with suppress(Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[0].cancel()
        for _ in range(self._threads):
            self._queue.put(None)
        self.interrupt(-1)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._interrupted:
                return
            future, call = item
            with suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    result = self._called(call)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._lock:
                self._unfinished -= 1

    def _called(self, call: Callable[[], Any]) -> Any:
        thread = threading.get_ident()
        try:
            self._running[thread] = time.monotonic()
            return call()
        finally:
            with self._lock:
                self._running.pop(thread, None)


class Function:
    """A reward that is a function.

    Args:
        extract: where the answer stands that majority votes count, a value of ``reward.extract``.
        threads: for a plain function; None for one that is over at once, which is called in place.
        loop: for an ``async`` one.
    """

    def __init__(self, reward: AnyReward, *, extract: str, threads: Threads | None, loop: Loop) -> None:
        self._reward = reward
        self._extract = extract
        self._threads = threads
        self._loop = loop
        self._is_async = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))

    def grade(self, request: GradeRequest) -> GradeOrFailure | Future[GradeOrFailure]:
        if self._is_async:
            return self._loop.submit(self._call_awaited(request))
        if self._threads is None:
            return self._grade_of(called(self._reward, request), request)
        return self._threads.submit(partial(self._call, request))

    def close(self) -> None:
        """Threads and loop are their owner's."""

    def _call(self, request: GradeRequest) -> GradeOrFailure:
        value = called(self._reward, request)
        if inspect.isawaitable(value):
            return self._loop.submit(self._await(value, request)).result()
        return self._grade_of(value, request)

    async def _call_awaited(self, request: GradeRequest) -> GradeOrFailure:
        return await self._await(called(self._reward, request), request)

    async def _await(self, value: object, request: GradeRequest) -> GradeOrFailure:
        return self._grade_of(await awaited(value, request), request)

    def _grade_of(self, value: object, request: GradeRequest) -> GradeOrFailure:
        """Return the grade in what a reward returned, with the answer as votes count it."""
        score = value if isinstance(value, Failure) else request.number(value)
        if isinstance(score, Failure):
            return score
        answer = extract(request.response, self._extract)
        return Grade(score=score, answer=None if answer is None else canonical(answer))
