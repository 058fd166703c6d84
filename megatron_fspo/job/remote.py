"""HTTP for synchronous callers: an event loop in a thread, an httpx client, requests with limits."""

from __future__ import annotations

import asyncio
import atexit
import json
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONNECT_SECONDS = 10.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between attempts
_REASON_BYTES = 10_000  # read of an error's page
# Not the global generator: its numbers must be reproducible in a run.
_jitter = random.Random()


@dataclass(frozen=True)
class Answer:
    """Outcome of a request."""

    status: int
    """HTTP status; 0 if no whole answer arrived."""
    content: bytes
    problem: str
    """Why the content cannot be used, such as status and reason; "" if it can. The reason may be long."""

    @property
    def transient(self) -> bool:
        """True if another attempt, or another server, may succeed."""
        return self.status in (0, 429) or self.status >= 500


async def request(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    seconds: float,
    largest: int = 2**20,
    attempts: int = 1,
    after_timeout: bool = True,
    **sent: Any,
) -> Answer:
    """Make a request, again while its outcome is :attr:`Answer.transient`. Redirects are not followed.

    Args:
        http: from :func:`http_client`.
        method: ``POST``, for example.
        url: whole URL.
        seconds: limit on the wall-clock time of an attempt, however slowly the answer drips.
        largest: maximum bytes of an answer; a longer one is not read to its end.
        attempts: maximum number of attempts. The waits are 0.5 s ± 50%, doubled each time, up to 30 s.
        after_timeout: try again even after an attempt that exceeded ``seconds``.
        sent: ``json`` or ``content``, ``headers`` and ``params`` of httpx.
    """
    import anyio  # not above: reward workers, which import this module, start fast
    import httpx

    async def traced(event: str, _: object) -> None:
        # Cancelled earlier, httpcore would keep the connection open for ever.
        if event == "http11.send_request_headers.started":
            limit.deadline = end

    limits = httpx.Timeout(None, connect=min(CONNECT_SECONDS, seconds))
    sent |= {"timeout": limits, "extensions": {"trace": traced}}
    for number in range(1, attempts + 1):
        status, content, problem, last = 0, bytearray(), "", number == attempts
        end = asyncio.get_running_loop().time() + seconds
        try:
            with anyio.fail_after(None) as limit:  # unlike asyncio's, does not interrupt httpcore's clean-up
                async with http.stream(method, url, **sent) as response:
                    most = largest if response.status_code == 200 else _REASON_BYTES
                    async for chunk in response.aiter_raw():  # decompressed it may be without limit
                        content += chunk
                        if len(content) > most:
                            break
            status = response.status_code
            if status != 200:
                problem = f"{status}: {_reason(content)}"
            elif len(content) > most:
                problem = f"more than {most} bytes"
        except TimeoutError:
            problem, last = f"no answer in {seconds:g} s", last or not after_timeout
        except httpx.RequestError as error:
            problem = f"{type(error).__name__} {error}"
        answer = Answer(status, bytes(content), problem)
        if last or not answer.transient:
            break
        await asyncio.sleep(min(_FIRST_WAIT * 2 ** (number - 1), _LONGEST_WAIT) * _jitter.uniform(0.5, 1.5))
    if answer.transient and number > 1:
        answer = replace(answer, problem=f"attempt {number} of {attempts}: {problem}")
    return answer


class Endpoint:
    """A URL that takes JSON by POST, ``concurrency`` requests at a time; limits are as in :func:`request`.
    Raises ``InputError`` if ``url``, the value of ``key``, is no http or https URL."""

    def __init__(self, url: str, key: str, *, concurrency: int, seconds: float, attempts: int) -> None:
        check_url(url, key)
        limits: dict[str, Any] = {"seconds": seconds, "attempts": attempts}
        self.url, self._limits = url, limits
        self.http, self._open = http_client(), asyncio.Semaphore(concurrency)

    async def post(self, value: object) -> Answer:
        """Return the answer to ``value``. Raises ``TypeError`` or ``ValueError`` if that is not JSON."""
        # ASCII, as UTF-8 cannot encode lone surrogates, which model text may contain.
        body = json.dumps(value, allow_nan=False).encode("ascii")
        sent: dict[str, Any] = {"content": body, "headers": {"Content-Type": "application/json"}}
        async with self._open:
            return await request(self.http, "POST", self.url, **sent, **self._limits)


def check_url(url: str, key: str) -> None:
    """Raise ``InputError`` unless ``url``, the value of ``key``, is an http or https URL."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{key} = {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"{key} = {url!r}: must be http://host:port/path, or https")


def one_line(text: str, limit: int = 300) -> str:
    """Return the text with white space collapsed, cut after ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}…"


def _reason(content: bytearray) -> str:
    """Return a server's reason: ``error.message`` of its JSON, or its text."""
    text = content.decode("utf-8", "replace")
    with suppress(ValueError, RecursionError, KeyError, TypeError, IndexError):
        text = str(json.loads(text)["error"]["message"])
    return text or "(no message)"


def http_client() -> httpx.AsyncClient:
    """Return a client for the machines of one cluster; the caller closes it."""
    import httpx

    return httpx.AsyncClient(
        # Callers limit concurrency. No keep-alive: httpx checks each idle connection before every request
        # (7 times slower at 64 open requests), and the server may be closing it at that moment.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # No proxies for machines of the cluster, and no credentials from ~/.netrc.
        trust_env=False,
        headers={"Accept-Encoding": "identity"},
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
        self.loop = asyncio.new_event_loop()
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
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def cancel(self) -> None:
        """Cancel all running coroutines and wait for their cleanup."""
        self.run(_cancel_all())

    def close(self) -> None:
        """Cancel all running coroutines and end the thread. Further calls do nothing."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(self._grace_seconds)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_cancel_all())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


async def _cancel_all() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await _wait_for_cancelled()


async def _wait_for_cancelled() -> None:
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t.cancelling()), return_exceptions=True)
