"""Worker processes that can be killed: where text of a model meets a library that may hang on it.

pebble's ``ProcessPool``, because a task that is over its time must end while the others go on. Of the
standard library, ``concurrent.futures`` kills no worker (``Future.cancel`` does nothing to a task that
runs, and a dead worker breaks the whole pool), ``multiprocessing.Pool`` waits for ever for the task of a
worker that died, and alarms are for the main thread of a process and are not heard by code in C, such as
``10**10**10``. pebble kills the worker of the one task, starts another, and gives each task a future.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pebble import ProcessExpired, ProcessPool

from megatron_fspo.rewards.processes import Context
from megatron_fspo.rewards.worker import limit

T = TypeVar("T")

_START_SECONDS = 120.0
_TASKS_PER_WORKER = 5000  # then a fresh one: libraries keep a little of everything
_ATTEMPTS = 3  # of a task whose pool broke around it


class Unfinished(Exception):
    """A task was killed: it was over its time, or twice over its CPU time, or what else a worker dies of."""


class KillablePool(Generic[T]):
    """Runs a function in worker processes, each call with limits.

    Example::

        pool = KillablePool(
            same_mathematics, workers=4, seconds=5.0, memory_gb=1.0, libraries=("math_verify",)
        )
        futures = [pool.submit("1/2", found, 5.0) for found in answers]

    Args:
        function: of a module that is light to import.
        seconds: of wall-clock time for each call, from when a worker takes it.
        memory_gb: of each worker, beyond the libraries'.
        libraries: modules that the function works with.

    Raises:
        RuntimeError: no worker comes up.
    """

    def __init__(
        self,
        function: Callable[..., T],
        *,
        workers: int,
        seconds: float,
        memory_gb: float,
        libraries: tuple[str, ...],
    ) -> None:
        self._function = function
        self._workers = workers
        self._seconds = seconds
        self._memory = int(memory_gb * 2**30)
        self._libraries = libraries
        self._lock = threading.Lock()
        self._waiting: dict[Future[T], _Call] = {}
        self._closed = False
        self._renewal: threading.Thread | None = None
        self._context = Context((*libraries, limit.__module__))
        self._pool = self._started()
        try:
            self._pool.schedule(_ready).result(timeout=_START_SECONDS)
        except Exception as error:
            self.close()
            raise RuntimeError(f"no grader process starts: {type(error).__name__} {error}") from error

    def submit(self, *args: Any) -> Future[T]:
        """The function's result to come, or :class:`Unfinished`, or what it raised. Does not wait."""
        result: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._waiting[result] = _Call(args)
            pool = self._pool
        self._schedule(pool, result, args)
        return result

    def close(self) -> None:
        """Kill the workers; what is not finished is cancelled. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            renewal = self._renewal
        for future in waiting:
            future.cancel()
        if renewal is not None:
            renewal.join()
        self._context.wake()
        self._pool.stop()
        self._pool.join()
        self._context.close()

    def __enter__(self) -> KillablePool[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _started(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            max_tasks=_TASKS_PER_WORKER,
            initializer=limit,
            initargs=(self._memory, self._libraries),
            context=self._context,
        )

    def _schedule(self, pool: ProcessPool, result: Future[T], args: tuple[Any, ...]) -> None:
        try:
            task = pool.schedule(self._function, args=args, timeout=self._seconds)
        except RuntimeError:
            self._renew(pool)
        else:
            task.add_done_callback(lambda task: self._settle(pool, task, result))

    def _settle(self, pool: ProcessPool, task: Future[T], result: Future[T]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, BrokenProcessPool):
            self._renew(pool)
            return
        with self._lock:
            call = self._waiting.get(result)
            if call is None:  # another pool has done it, or this one is closed
                return
            # Perhaps not the task's doing: the system was out of memory, or somebody killed the worker.
            again = isinstance(error, ProcessExpired) and not call.died
            if again:
                call.died, pool = True, self._pool
            else:
                del self._waiting[result]
        if again:
            self._schedule(pool, result, call.args)
        elif error is None:
            result.set_result(task.result())
        elif isinstance(error, TimeoutError | ProcessExpired):
            result.set_exception(Unfinished(f"{type(error).__name__}: {error}"))
        else:
            result.set_exception(error)

    def _renew(self, broken: ProcessPool) -> None:
        """Replace a pool that broke: pebble's does when a worker dies that has no task.
        In a thread, as this may be one of the pool's own, which it would wait for."""
        with self._lock:
            if self._closed or self._renewal is not None or broken is not self._pool:
                return
            self._renewal = threading.Thread(target=self._replace, name="grader pool", daemon=True)
        self._renewal.start()

    def _replace(self) -> None:
        self._pool.stop()
        self._pool.join()
        with self._lock:
            self._renewal = None
            if self._closed:
                return
            self._pool = pool = self._started()
            for call in self._waiting.values():
                call.attempts += 1
            given_up = [result for result, call in self._waiting.items() if call.attempts > _ATTEMPTS]
            for result in given_up:
                del self._waiting[result]
            again = list(self._waiting.items())
        for result in given_up:
            result.set_exception(Unfinished(f"the pool broke {_ATTEMPTS} times"))
        for result, call in again:
            self._schedule(pool, result, call.args)


@dataclass
class _Call:
    args: tuple[Any, ...]
    attempts: int = 1
    died: bool = False
    """A worker did, with it."""


def _ready() -> None:
    """The first task of a pool: a worker is there."""
