"""Parts of a client over HTTP: an event loop in a thread, httpx's client, attempts that are repeated."""

from __future__ import annotations

import asyncio
import atexit
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

# A generator of its own: the global one belongs to the run, whose numbers repeat.
_jitter = random.Random()


class TryAgain(Exception):
    """An attempt failed in a way that may pass."""


async def attempted(
    attempt: Callable[[], Awaitable[T]], attempts: int, *, first_wait: float, longest_wait: float
) -> T:
    """Await ``attempt()`` until it does not raise :class:`TryAgain`, ``attempts`` times at most.

    The wait before the second attempt is ``first_wait`` seconds, give or take half of it; it doubles from
    there up to ``longest_wait``.

    Raises:
        TryAgain: that of the last attempt.
    """
    for number in range(attempts - 1):
        try:
            return await attempt()
        except TryAgain:
            await asyncio.sleep(min(first_wait * 2**number, longest_wait) * _jitter.uniform(0.5, 1.5))
    return await attempt()


def http_client() -> httpx.AsyncClient:
    """A client for the machines of one cluster; whoever made it closes it."""
    import httpx  # worker processes of rewards import this module, and must start fast

    return httpx.AsyncClient(
        # Callers limit what is open. No connection is kept for later: httpx looks at each idle one before
        # every request (7 times the time at 64 open requests), and a server may just be closing it.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # No proxies for the cluster's own machines, and no keys from a ~/.netrc.
        trust_env=False,
    )


class Loop:
    """An asyncio loop in a thread of its own, for callers that are not asynchronous.

    Example::

        with Loop("rollout") as loop:
            answer = loop.run(server.get("weight_info"))

    What was cancelled has ``grace_seconds`` to clean up.
    """

    def __init__(self, name: str, *, grace_seconds: float = 10.0) -> None:
        self._grace_seconds = grace_seconds
        self._loop = asyncio.new_event_loop()
        # A daemon, because Python waits for the others before it calls what atexit holds.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for the coroutine's result, or its error.

        An interrupt of the caller (Ctrl-C, a signal handler that raises) cancels the coroutine, waits at most
        ``grace_seconds`` until it has cleaned up, and goes on as that interrupt.

        Raises:
            RuntimeError: the loop is closed, or this is its own thread.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a coroutine waits for its own loop")
        result = self.submit(coroutine)
        try:
            return result.result()
        except BaseException:
            if result.cancel():
                wait([self.submit(_wait_for_cancelled())], timeout=self._grace_seconds)
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine and do not wait for it.

        Raises:
            RuntimeError: the loop is closed.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("a closed loop")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def cancel(self) -> None:
        """Cancel what is running, and wait until it has cleaned up."""
        self.run(_cancel_all())

    def close(self) -> None:
        """Cancel what is running and end the thread. A second call does nothing."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._grace_seconds)

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
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await _wait_for_cancelled()


async def _wait_for_cancelled() -> None:
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t.cancelling()), return_exceptions=True)
