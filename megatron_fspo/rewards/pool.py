"""Worker processes that can be killed: where text of a model meets a library that may hang on it.

A worker is an interpreter of its own, with the libraries and without the trainer's memory: the trainer has
threads, GPUs and process groups, and must not be forked. A thread for each worker hands it one task after
the other, and kills and replaces the process of a task that is over its time while the others go on. What
comes back is JSON, so nothing that a worker was made to send is run here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from megatron_fspo.rewards import worker

_START_SECONDS = 120.0
_LARGEST = 2**20  # bytes of an answer


class Unfinished(Exception):
    """A task hit a limit: of time, memory or recursion, or twice one of which the worker died."""


class WorkerError(Exception):
    """The function raised: ``kind`` is the name of the exception's type, ``text`` what it said."""

    def __init__(self, kind: str, text: str, traceback: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text
        self.add_note(traceback)


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

    Raises:
        RuntimeError: a worker does not come up.
    """

    def __init__(self, function: str, *, workers: int, seconds: float, memory_gb: float) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: SimpleQueue[tuple[Future[Any], bytes] | None] = SimpleQueue()
        self._workers = [_Worker(function, seconds, int(memory_gb * 2**30)) for _ in range(workers)]
        ready: list[Future[None]] = [Future() for _ in self._workers]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name="grader worker", daemon=True)
            for pair in zip(self._workers, ready, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for one in ready:
                one.result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"no grader process starts: {type(error).__name__} {error}") from error

    def submit(self, *args: Any) -> Future[Any]:
        """Return the result to come; see :meth:`_Worker.call`. Does not wait."""
        result: Future[Any] = Future()
        task = json.dumps(args).encode() + b"\n"
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._tasks.put((result, task))
        return result

    def close(self) -> None:
        """Kill the workers; what is not finished is cancelled. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with suppress(Empty):
            while (item := self._tasks.get_nowait()) is not None:
                item[0].cancel()
        for one in self._workers:
            self._tasks.put(None)
            one.end()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> KillablePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self, process: _Worker, ready: Future[None]) -> None:
        """Work of the thread of one worker. Only it starts the process, which would end with its thread."""
        try:
            process.ready()
        except Exception as error:
            ready.set_exception(error)
        else:
            ready.set_result(None)
        while (item := self._tasks.get()) is not None:
            result, task = item
            if result.cancelled():
                continue
            try:
                settle = partial(result.set_result, process.call(task))
            except Exception as error:
                settle = partial(result.set_exception, error)
            with suppress(InvalidStateError):  # cancelled meanwhile
                if self._closed:
                    result.cancel()
                else:
                    settle()
            with suppress(Exception):  # else the next task says what is wrong
                process.ready()
        process.stop()


class _Worker:
    """A worker process, replaced where it died. One thread's, but for :meth:`end`."""

    def __init__(self, function: str, seconds: float, memory_bytes: int) -> None:
        self._settings = (os.getpid(), function, seconds, memory_bytes)
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
        if error[0] in ("MemoryError", "RecursionError"):
            raise Unfinished(": ".join(error[:2]))
        raise WorkerError(*error)
