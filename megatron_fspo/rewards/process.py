"""The process of a user's rewards: a call that computes without end, or crashes, does not harm the trainer.

Plain functions are called in threads, ``async`` ones on an event loop. Requests are pickled, many at a time.
Answers are lines of JSON: the trainer executes nothing that comes from the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from traceback import walk_stack
from types import CoroutineType
from typing import Any

from megatron_fspo.job.parent import end_with_parent, has_ended, kill_and_wait, start_python
from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards.grade import Failure, Function, Grade, GradeOrFailure, GradeRequest, Verifier
from megatron_fspo.rewards.registry import get_reward

STANDING_SECONDS = 10.0  # that the process has to tell at which lines its calls stand
_END_SECONDS, _LOOK_SECONDS = 1.0, 0.1


def standing(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return the lines of code at which calls stand: in threads, and those that ``loop`` awaits."""
    codes = {Function._call.__code__, Function.graded.__code__}
    threads = sys._current_frames().values()
    frames = [top for top in threads if codes.intersection(outer.f_code for outer, _ in walk_stack(top))]
    for task in asyncio.all_tasks(loop):
        last: Any = task.get_coro()
        while isinstance(inner := last.cr_await, CoroutineType) and "/asyncio/" not in str(inner.cr_code):
            last = inner
        frames.append(last.cr_frame)
    lines = {(frame.f_code.co_filename, frame.f_lineno) for frame in frames if frame is not None}
    theirs = (line for line in sorted(lines) if Path(line[0]).parent != Path(__file__).parent)
    return [f"{file}:{line}" for file, line in theirs]


class RewardProcess:
    """Runs functions (``rewards``: name → module) in a process that ends when ``loop`` is closed; at most
    ``concurrency`` calls of plain ones at a time. Does not wait for its start."""

    def __init__(self, loop: Loop, rewards: Mapping[str, str], extract: str, concurrency: int) -> None:
        self.loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self._ended = asyncio.Event(), ""
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        # The process ends with the thread that starts it: the loop's.
        loop.submit(self._serve(dict(rewards), extract, concurrency))

    async def grade(self, name: str, request: GradeRequest) -> GradeOrFailure:
        """Return the grade from the reward ``name``."""
        # Routes are a tensor: to read it would import torch.
        sent = replace(request, completion=replace(request.completion, routes=None))
        score, answer, problem, lines = await self._ask(name, sent)
        if problem:
            return replace(request.failure(problem), traceback=tuple(lines))
        return Grade(score=score, answer=answer)

    def standing(self) -> list[str]:
        """Return the lines of code at which calls stand. If the process does not answer, as one holds the
        GIL, it prints the stacks of its threads to stderr."""
        try:
            return list(self.loop.submit(self._ask()).result(STANDING_SECONDS)[-1])
        except TimeoutError:
            if self._process is not None:
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(_LOOK_SECONDS)
            return []

    async def _ask(self, *asked: Any) -> Any:
        await self._ready.wait()
        if self._ended:
            return [None, None, self._ended, ()]
        number = next(self._numbers)
        self._open[number] = answer = asyncio.get_running_loop().create_future()
        self._writer.write(pickle.dumps((number, *asked)))
        return await answer

    async def _serve(self, *settings: Any) -> None:
        try:
            self._process, reader, self._writer = await start_python(main, *settings)
            self._ready.set()
            while line := await reader.readline():
                number, answer = json.loads(line)
                if not (waiting := self._open.pop(number)).done():
                    waiting.set_result(answer)
        finally:
            if self._process is not None:
                self._writer.transport.abort()
                end = time.monotonic() + _END_SECONDS
                while not has_ended(self._process) and time.monotonic() < end:
                    await asyncio.sleep(_LOOK_SECONDS)
                kill_and_wait(self._process)
            self._ended = f"ended its process, status {self._process and self._process.returncode}"
            self._ready.set()
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_result([None, None, self._ended, ()])


class Own(Verifier):
    """A user's reward in the process of such."""

    def __init__(self, name: str, process: RewardProcess) -> None:
        self._name, self._process = name, process

    def grade(self, request: GradeRequest) -> Future[GradeOrFailure]:
        return self._process.loop.submit(self._process.grade(self._name, request))


def main(descriptor: int, parent: int, rewards: Mapping[str, str], extract: str, concurrency: int) -> None:
    """Answer requests until the socket is closed. See :class:`RewardProcess`."""
    end_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: None)  # to all processes of a job: the trainer may finish a step
    sys.setswitchinterval(5e-4)  # a call without end makes others wait for so long, by default 10 times
    lock = threading.Lock()
    with socket.socket(fileno=descriptor) as connection, Loop("async rewards", grace_seconds=1) as loop:
        loop.loop.set_default_executor(ThreadPoolExecutor(concurrency))
        for module in rewards.values():
            importlib.import_module(module)  # which may register the name
        functions = {name: Function(get_reward(name), extract, loop) for name in rewards}

        def answer(number: int, *values: object) -> None:
            with lock, suppress(OSError):  # the trainer has closed it
                connection.sendall(json.dumps([number, values]).encode() + b"\n")

        async def grade(number: int, name: str, request: GradeRequest) -> None:
            grade = await functions[name].graded(request)
            if isinstance(grade, Failure):
                answer(number, None, None, grade.problem, grade.traceback)
            else:
                answer(number, grade.score, grade.answer, "", ())

        with suppress(EOFError, OSError), connection.makefile("rb") as stream:
            while True:
                number, *asked = pickle.load(stream)
                if asked:
                    loop.submit(grade(number, *asked))
                else:
                    answer(number, standing(loop.loop))
