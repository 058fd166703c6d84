"""Building blocks of HTTP clients: an event loop in a thread, an httpx client, retries, bounded requests."""

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

LARGEST = 2**20
"""Maximum bytes of an answer to :func:`post`."""
# Not the global generator: its numbers must be reproducible in a run.
_jitter = random.Random()


class TryAgain(Exception):
    """An attempt failed with an error that may be temporary."""


async def attempted(
    attempt: Callable[[], Awaitable[T]], attempts: int, *, first_wait: float, longest_wait: float
) -> T:
    """Await ``attempt()`` until it does not raise :class:`TryAgain`; the last of ``attempts`` may. Waits
    ``first_wait`` seconds ±50% before the second, then twice as long each time, up to ``longest_wait``."""
    for number in range(attempts - 1):
        try:
            return await attempt()
        except TryAgain:
            await asyncio.sleep(min(first_wait * 2**number, longest_wait) * _jitter.uniform(0.5, 1.5))
    return await attempt()


async def post(
    http: httpx.AsyncClient, url: str, body: bytes, *, seconds: float, key: str
) -> tuple[int, bytes]:
    """Make one attempt to POST ``body``, JSON; return the status and the answer, uncompressed.

    ``seconds`` limits the whole attempt in wall-clock time, however slowly the answer drips; ``key`` is its
    configuration key.

    Raises:
        TryAgain: a lost connection, a timeout, 429 or 5xx.
        ValueError: the answer has more than :data:`LARGEST` bytes; it is not read to its end.
    """
    import httpx

    # A small compressed answer may expand without limit.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    answer = bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            http.stream("POST", url, content=body, headers=headers, timeout=None) as response,
        ):
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > LARGEST:
                    raise ValueError(f"more than {LARGEST} bytes from {url}: {excerpt(answer)}")
    except TimeoutError:
        raise TryAgain(f"no answer in {seconds:g} s ({key})") from None
    except httpx.RequestError as error:
        raise TryAgain(one_line(f"{type(error).__name__} {error}")) from None
    if response.status_code >= 500 or response.status_code == 429:
        raise TryAgain(f"{response.status_code} {excerpt(answer)}")
    return response.status_code, bytes(answer)


def one_line(text: str, limit: int = 300) -> str:
    """Return the text with white space collapsed, cut after ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}…"


def excerpt(content: bytes | bytearray) -> str:
    """Return the beginning of an answer as one line."""
    return one_line(content[:2000].decode("utf-8", "replace"), 200) or "(nothing)"


def http_client() -> httpx.AsyncClient:
    """A client for the machines of one cluster; the caller closes it."""
    import httpx  # imported here so that reward workers, which import this module, start fast

    return httpx.AsyncClient(
        # Callers limit concurrency. No keep-alive: httpx checks each idle connection before every request
        # (7 times slower at 64 open requests), and the server may be closing it at that moment.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # No proxies for machines of the cluster, and no credentials from ~/.netrc.
        trust_env=False,
    )


class Loop:
    """An asyncio loop in a separate thread, for synchronous callers.

    Example::

        with Loop("rollout") as loop:
            answer = loop.run(server.get("weight_info"))

    Cancelled coroutines have ``grace_seconds`` to clean up.
    """

    def __init__(self, name: str, *, grace_seconds: float = 10.0) -> None:
        self._grace_seconds = grace_seconds
        self._loop = asyncio.new_event_loop()
        # A daemon, because Python joins other threads before it calls the atexit handlers.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result, or raise its exception.

        An interrupt of the caller (Ctrl-C, a signal handler that raises) cancels the coroutine, waits at most
        ``grace_seconds`` for its cleanup, and is raised again.

        Raises:
            RuntimeError: the loop is closed, or called from its own thread.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("Loop.run() called from the loop's own thread would wait for itself forever")
        result = self.submit(coroutine)
        try:
            return result.result()
        except BaseException:
            if result.cancel():
                wait([self.submit(_wait_for_cancelled())], timeout=self._grace_seconds)
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine without waiting for it. Raises ``RuntimeError`` if the loop is closed."""
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("the loop is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def cancel(self) -> None:
        """Cancel all running coroutines and wait for their cleanup."""
        self.run(_cancel_all())

    def close(self) -> None:
        """Cancel all running coroutines and end the thread. Further calls do nothing."""
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
