"""Runs a function in killable worker processes, for libraries that may hang on model output.

A worker gets tasks one by one. It is killed and replaced if a task exceeds its time. Results are JSON, so a
compromised worker cannot make the trainer execute code.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_fspo.job.parent import clean_environment, has_ended, kill_and_wait, start_python
from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards import worker
from megatron_fspo.rewards.grade import Grade, GradeOrFailure, GradeRequest, Verifier

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # not at run time: it would import torch in workers

START_SECONDS = 120.0
MOST_TASKS = 5000
"""Maximum tasks of a worker process, since libraries leak some memory."""


class Unfinished(Exception):
    """A task exceeded its limit on time, memory or recursion, or its worker died twice."""


class WorkerError(Exception):
    """The function raised. Has the exception's type and message, and its traceback as a note."""


class KillablePool:
    """Runs a function in worker processes, each call with limits.

    Args:
        function: ``module:name``; its arguments and value are JSON types.
        workers: number of processes.
        seconds: limit on the wall-clock time of a call, from when a worker starts it, and on its CPU time.
        memory_gb: limit on a worker's memory beyond that after importing the module.
        tasks: number of calls after which a process is replaced.
        env: environment variables of a process; default: :func:`clean_environment`.

    Raises:
        RuntimeError: a worker does not start.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int,
        seconds: float,
        memory_gb: float,
        tasks: int = MOST_TASKS,
        env: Mapping[str, str] | None = None,
    ) -> None:
        settings = env or clean_environment(), seconds, function, seconds, int(memory_gb * 2**30), tasks
        self.loop = Loop("workers")  # worker processes end with its thread, which starts them
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers = [_Worker(*settings) for _ in range(workers)]
        atexit.register(self.close)
        try:
            for start in [self.loop.submit(process.ready()) for process in self._workers]:
                start.result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"worker processes do not start: {type(error).__name__} {error}") from error
        for process in self._workers:
            self._idle.put_nowait(process)

    def submit(self, *args: Any) -> Future[Any]:
        """Return a future of the result, see :meth:`_Worker.call`. Does not block."""
        return self.loop.submit(self.call(*args))

    def close(self) -> None:
        """Cancel unfinished calls and kill the workers. Idempotent."""
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # it is closed
            self.loop.run(self._stop())
        self.loop.close()

    async def call(self, *args: Any) -> Any:
        """Return the result, on :attr:`loop`."""
        task, worker = json.dumps(args).encode() + b"\n", await self._idle.get()
        try:
            return await worker.call(task)
        finally:
            self._idle.put_nowait(worker)

    async def _stop(self) -> None:
        for process in self._workers:
            process.ended = True
            process.stop()


class _Worker:
    """A worker process, restarted if it died. Runs one call at a time."""

    def __init__(self, env: Mapping[str, str], seconds: float, *settings: Any) -> None:
        self._env, self._seconds, self._settings = env, seconds, settings
        self._process: subprocess.Popen[bytes] | None = None
        self.ended = False
        self._tasks = 0
        """Number of tasks sent to the process; its answer must have this number."""

    async def ready(self) -> None:
        """Start the process unless it is running, and wait until it has imported its libraries. Raises
        ``WorkerError`` if the import fails, ``OSError`` if the process dies or does not answer in time."""
        if self._process is not None and not has_ended(self._process):
            return
        self.stop()
        if self.ended:
            raise asyncio.CancelledError
        started = await start_python(worker.main, *self._settings, env=self._env, quiet=True)
        self._process, self._reader, self._writer = started
        self._tasks = 0
        await self._answer(b"", START_SECONDS)

    async def call(self, task: bytes) -> Any:
        """Return the function's value. If the worker dies, the task is tried once more, as the cause may be
        another one, such as the system's out-of-memory killer. Raises ``Unfinished`` if the task exceeds a
        limit or two workers die of it, ``WorkerError`` if the function raises."""
        for _ in range(2):
            try:
                await self.ready()
                self._tasks += 1
                return await self._answer(task, self._seconds)
            except (OSError, ValueError, asyncio.CancelledError) as error:
                self.stop()
                if isinstance(error, asyncio.CancelledError):
                    raise
                if isinstance(error, TimeoutError):
                    raise Unfinished(f"over its time of {self._seconds:g} s") from None
        raise Unfinished("two workers died of it")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._writer.transport.abort()
            kill_and_wait(process)

    async def _answer(self, task: bytes, seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            self._writer.write(task)
            await self._writer.drain()
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the worker died")
        number, value, error, last = json.loads(line)
        if number != self._tasks:
            raise ConnectionError("the worker sent an answer to another task")
        if last:
            self.stop()
        if error is None:
            return value
        kind, text, traceback = error
        if kind in ("MemoryError", "RecursionError"):
            raise Unfinished(f"{kind}: {text}")
        raised = WorkerError(f"{kind}: {text}")
        raised.add_note(traceback)
        raise raised


class InWorkers(Verifier):
    """A reward that is a function in worker processes."""

    function: ClassVar[str]
    """``module:name``."""

    def __init__(self, config: Reward, loop: Loop) -> None:
        self._extract = config.extract
        self._pool = KillablePool(
            self.function, workers=config.workers, seconds=config.seconds, memory_gb=config.memory_gb
        )

    def close(self) -> None:
        self._pool.close()

    def ask(
        self, request: GradeRequest, *task: str, unfinished: Grade, then: Callable[[Any], GradeOrFailure]
    ) -> Future[GradeOrFailure]:
        """Return a future of ``then`` of the function's value, or of ``unfinished`` if it exceeds a limit."""

        async def ask() -> GradeOrFailure:
            try:
                return then(await self._pool.call(*task))
            except Unfinished:
                return unfinished
            except Exception as error:  # the function raised, or ``then`` got a forged value
                return request.failure(f"raised {error}", error)

        return self._pool.loop.submit(ask())
