"""An asyncio loop in a thread of its own, for a trainer that is not asynchronous."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE_SECONDS = 10.0  # for what was cancelled to clean up


class Loop:
    """Runs coroutines for synchronous callers.

    Example::

        with Loop() as loop:
            answer = loop.run(server.get("weight_info"))
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, because Python waits for the others before it calls what atexit holds.
        self._thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, or its error.

        An interrupt of the caller (Ctrl-C, a signal handler that raises) cancels the coroutine, waits at most
        10 seconds until it has cleaned up, and goes on as that interrupt.

        Raises:
            RuntimeError: the loop is closed, or this is its own thread.
        """
        result, cancel = self._start(coroutine)
        try:
            return result.result()
        except BaseException:
            if not result.done():
                cancel()
                wait([result], timeout=_GRACE_SECONDS)
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine and do not wait for it; raises like :meth:`run`."""
        return self._start(coroutine)[0]

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> tuple[Future[T], Callable[[], None]]:
        """Its result to come, and what cancels it."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a closed loop, or a coroutine that waits for its own loop")
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _settle(result, task))

        def cancel() -> None:
            # Callbacks run in order: start() is through by then.
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        self._loop.call_soon_threadsafe(start)
        return result, cancel

    def cancel(self) -> None:
        """Cancel what is running, and wait until it has cleaned up."""
        self.run(_cancel_all())

    def close(self) -> None:
        """Cancel what is running and end the thread. A second call does nothing."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_SECONDS)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _settle(result: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        result.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())
