"""Runs calls in threads, or in killable worker processes for libraries that may hang on model output.

Workers are new interpreters, not forks, as the trainer has threads, GPUs and process groups. One thread per
worker sends it tasks one by one, and kills and replaces the process if a task exceeds its time. Results are
JSON, so a compromised worker cannot make the trainer execute code.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megatron_fspo.job.parent import clean_environment, has_ended, kill_group
from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards import worker
from megatron_fspo.rewards.grade import Grade, GradeOrFailure, GradeRequest, Interrupted, Verifier

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # not at run time: it would import torch in workers

T = TypeVar("T")
START_SECONDS = 120.0
_KILL_SECONDS = 10.0
_LARGEST = 2**20  # bytes of an answer
MOST_TASKS = 5000
"""Maximum tasks of a worker process, since libraries leak some memory."""


class Threads:
    """Runs at most ``most`` calls at a time, each in a thread that is started when needed.

    Threads are daemons, unlike those of ``concurrent.futures``, so a call that never returns does not block
    the exit of the program.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, tuple[float, Future[Any]]] = {}
        """Thread → start time of its call, and its future."""
        self._interrupted = self._closed = False
        self._unfinished = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Return a future of the call's result. Raises ``RuntimeError`` if closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are closed")
            self._queue.put((future, call))
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._most):
                self._threads.append(threading.Thread(target=self._work, name="reward", daemon=True))
                self._threads[-1].start()
        return future

    def interrupt(self, seconds: float) -> None:
        """Raise :class:`Interrupted` in calls that have run for more than ``seconds``. If there was one, no
        further call starts.

        An endless computation would compete with the training thread for the GIL. A call that waits in C
        code is interrupted only when the wait ends.
        """
        with self._lock:  # so that no call ends meanwhile
            for thread, (began, future) in self._running.items():
                if time.monotonic() - began > seconds:
                    self._interrupted = True
                    self._running[thread] = time.monotonic(), future
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(Interrupted)
                    )

    def close(self) -> None:
        """Cancel pending calls and refuse new ones, without waiting for running calls."""
        with self._lock:
            self._closed = True
            futures = [future for _, future in self._running.values()]
        with suppress(Empty):
            while (item := self._queue.get_nowait()) is not None:
                futures.append(item[0])
        for future in futures:
            future.cancel()
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_KILL_SECONDS)

    def _work(self) -> None:
        thread = threading.get_ident()
        while (item := self._queue.get()) is not None and not self._interrupted:
            future, call = item
            with suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    try:
                        self._running[thread] = time.monotonic(), future
                        result = call()
                    finally:
                        with self._lock:
                            self._running.pop(thread, None)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._lock:
                self._unfinished -= 1


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
        memory_bytes, env = int(memory_gb * 2**30), env or clean_environment()
        self._workers = [_Worker(function, seconds, memory_bytes, tasks, env) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        # Worker processes end with the thread that started them, so these threads persist.
        self._threads = Threads(workers)
        try:
            for start in [self._threads.submit(one.ready) for one in self._workers]:
                start.result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"worker processes do not start: {type(error).__name__} {error}") from error
        for one in self._workers:
            self._idle.put(one)

    def submit(self, *args: Any) -> Future[Any]:
        """Return a future of the result, see :meth:`_Worker.call`. Does not block."""
        return self._threads.submit(partial(self._call, json.dumps(args).encode() + b"\n"))

    def close(self) -> None:
        """Cancel unfinished calls and kill the workers. Idempotent."""
        self._threads.close()
        for one in self._workers:
            one.end()
        self._threads.join()
        for one in self._workers:
            one.stop()

    def _call(self, task: bytes) -> Any:
        process = self._idle.get_nowait()  # there are as many threads as workers
        try:
            return process.call(task)
        finally:
            self._idle.put(process)


class _Worker:
    """A worker process, restarted if it died. Not thread-safe except for :meth:`end`."""

    def __init__(
        self, function: str, seconds: float, memory_bytes: int, tasks: int, env: Mapping[str, str]
    ) -> None:
        self._env = env
        self._settings = (os.getpid(), function, seconds, memory_bytes, tasks)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = 0
        """Number of tasks sent to the process; its answer must have this number."""
        self._socket = socket.socket()

    def ready(self) -> None:
        """Start the process unless it is running, and wait until it has imported its libraries. Raises
        ``WorkerError`` if the import fails, ``OSError`` if the process dies or does not answer in time."""
        if self._process is not None and not has_ended(self._process):
            return
        self.stop()
        self._socket, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._ended:
                raise ConnectionError("the pool is closed")
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {worker.__name__} import main; "
                f"main({theirs.fileno()}, *{self._settings!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._tasks = 0
        try:
            self._answer(b"", START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def call(self, task: bytes) -> Any:
        """Return the function's value. If the worker dies, the task is tried once more, as the cause may be
        another one, such as the system's out-of-memory killer. Raises ``Unfinished`` if the task exceeds a
        limit or two workers die of it, ``WorkerError`` if the function raises."""
        for _ in range(2):
            try:
                self.ready()
                self._tasks += 1
                return self._answer(task, self._seconds)
            except TimeoutError:
                self.stop()
                raise Unfinished(f"over its time of {self._seconds:g} s") from None
            except (OSError, ValueError):
                self.stop()
        raise Unfinished("two workers died of it")

    def stop(self) -> None:
        self._socket.close()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            with suppress(subprocess.TimeoutExpired):  # in a system call that cannot be interrupted
                process.wait(_KILL_SECONDS)

    def end(self) -> None:
        """Kill the process and do not restart it. Thread-safe."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                kill_group(self._process)

    def _answer(self, task: bytes, seconds: float) -> Any:
        end = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(task)
        line = b""
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(end - time.monotonic(), 1e-3))
            piece = self._socket.recv(2**16)
            if not piece or len(line) > _LARGEST:
                raise ConnectionError("the worker died")
            line += piece
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
        result: Future[GradeOrFailure] = Future()

        def settle(work: Future[Any]) -> None:
            try:
                result.set_result(then(work.result()))
            except CancelledError:
                result.cancel()
            except Unfinished:
                result.set_result(unfinished)
            except Exception as error:  # the function raised, or ``then`` got a forged value
                result.set_result(request.failure(f"raised {error}", error))

        self._pool.submit(*task).add_done_callback(settle)
        return result
