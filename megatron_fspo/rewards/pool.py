"""Calls in threads, and worker processes that can be killed: where text of a model meets a library that may
hang on it.

A worker is an interpreter of its own, with the libraries and without the trainer's memory: the trainer has
threads, GPUs and process groups, and must not be forked. A thread for each worker hands it one task after
the other, and kills and replaces the process of a task that is over its time while the others go on. What
comes back is JSON, so nothing that a worker was made to send is run here.
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
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards import worker
from megatron_fspo.rewards.grade import Grade, GradeOrFailure, GradeRequest, Interrupted, Verifier

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # at run time it would bring torch to the worker processes

T = TypeVar("T")
_START_SECONDS = 120.0
_LARGEST = 2**20  # bytes of an answer
MOST_TASKS = 5000
"""Of a worker process: libraries keep a little of everything."""


class Threads:
    """At most ``most`` calls at a time, each in a thread. Threads are started as they are needed.

    Those of ``concurrent.futures`` are no daemons: one call that never returns would keep the program from
    ending.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, tuple[float, Future[Any]]] = {}
        """Thread → when its call began, and its result."""
        self._interrupted = self._closed = False
        self._unfinished = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Return the call's result to come, or its error; ``RuntimeError`` when closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads are closed")
            self._queue.put((future, call))
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._most):
                self._threads.append(threading.Thread(target=self._work, name="reward", daemon=True))
                self._threads[-1].start()
        return future

    def interrupt(self, seconds: float) -> None:
        """Raise :class:`Interrupted` in calls that have run for longer; after that no other call begins.

        A call that computes without end takes Python's lock for 5 ms at a time, from the thread that trains
        too. One that waits in C hears of it at the end of its wait.
        """
        with self._lock:  # so that none of them ends meanwhile
            for thread, (began, future) in self._running.items():
                if time.monotonic() - began > seconds:
                    self._interrupted = True
                    self._running[thread] = time.monotonic(), future
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(Interrupted)
                    )

    def close(self) -> None:
        """Cancel all that is not finished, and begin no other call. Nobody waits for those that run."""
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
        """Wait for the end of the calls that run; after :meth:`close`."""
        for thread in self._threads:
            thread.join()

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
    """A task hit a limit: of time, memory or recursion, or twice one of which the worker died."""


class WorkerError(Exception):
    """The function raised: the name of the exception's type and what it said; a note with its traceback."""


class KillablePool:
    """Runs a function in worker processes, each call with limits.

    Example::

        pool = KillablePool(
            "megatron_fspo.rewards.math_worker:compare", workers=4, seconds=5.0, memory_gb=1.0
        )
        futures = [pool.submit("1/2", answer) for answer in answers]

    Args:
        function: as ``module:name``; takes and returns what JSON has words for.
        seconds: of wall-clock time for each call, from when a worker takes it, and of CPU time.
        memory_gb: of each worker, beyond what it has when the module is imported.
        tasks: of a process, which a fresh one then replaces.

    Raises:
        RuntimeError: a worker does not come up.
    """

    def __init__(
        self, function: str, *, workers: int, seconds: float, memory_gb: float, tasks: int = MOST_TASKS
    ) -> None:
        memory_bytes = int(memory_gb * 2**30)
        self._workers = [_Worker(function, seconds, memory_bytes, tasks) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        # Processes end with the thread that started them, and these stay.
        self._threads = Threads(workers)
        try:
            for start in [self._threads.submit(one.ready) for one in self._workers]:
                start.result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"no worker process starts: {type(error).__name__} {error}") from error
        for one in self._workers:
            self._idle.put(one)

    def submit(self, *args: Any) -> Future[Any]:
        """Return the result to come; see :meth:`_Worker.call`. Does not wait."""
        return self._threads.submit(partial(self._call, json.dumps(args).encode() + b"\n"))

    def close(self) -> None:
        """Kill the workers; what is not finished is cancelled. A second call does nothing."""
        self._threads.close()
        for one in self._workers:
            one.end()
        self._threads.join()
        for one in self._workers:
            one.stop()

    def _call(self, task: bytes) -> Any:
        process = self._idle.get()
        try:
            return process.call(task)
        finally:
            self._idle.put(process)


class _Worker:
    """A worker process, replaced where it died. One thread's at a time, but for :meth:`end`."""

    def __init__(self, function: str, seconds: float, memory_bytes: int, tasks: int) -> None:
        self._settings = (os.getpid(), function, seconds, memory_bytes, tasks)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = 0
        """That the process has been given; an answer with another number is none."""
        self._socket = socket.socket()

    def ready(self) -> None:
        """Start the process unless it runs, and wait for its libraries.

        Raises:
            WorkerError: they cannot be imported.
            OSError: the process died, or did not answer in time.
        """
        if self._process is not None and self._process.poll() is None:
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
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._tasks = 0
        try:
            self._answer(b"", _START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def call(self, task: bytes) -> Any:
        """Return the function's value. A task whose worker dies is tried once more: that may not be the
        task's doing, as the system was out of memory, or somebody killed the worker.

        Raises:
            Unfinished: the task hit a limit, or two workers died of it.
            WorkerError: the function raised.
        """
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
        """Kill the process, if there is one."""
        self._socket.close()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def end(self) -> None:
        """Kill the process, and start none again. Any thread may call this."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

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
            raise ConnectionError("the worker answers something else")
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
    """As ``module:name``."""

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
        """Return the grade to come: what ``then`` makes of the value, or ``unfinished`` at a limit."""
        result: Future[GradeOrFailure] = Future()

        def settle(work: Future[Any]) -> None:
            try:
                result.set_result(then(work.result()))
            except CancelledError:
                result.cancel()
            except Unfinished:
                result.set_result(unfinished)
            except Exception as error:  # of the function; or what came back is not of its making
                result.set_result(request.failure(f"raised {error}", error))

        self._pool.submit(*task).add_done_callback(settle)
        return result
