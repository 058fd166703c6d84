"""``environment.name = "http"``: a tool server behind a URL.

A request is ``{"prompt", "turns", "answer", "fields"}`` as JSON. The reply is text to insert, a number (the
end, with this reward), null (the end), or an object with fields of an observation. Transient errors are
retried.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any

from megatron_fspo.environments.worker import fields_of
from megatron_fspo.job.remote import Loop, attempted, http_client, post
from megatron_fspo.rewards.remote import check_url

ATTEMPTS = 4
_FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
_REQUESTS = 64
"""Maximum number of concurrent requests."""


class ToolServer:
    """Client of a tool server, with its own thread. Raises ``InputError`` for an invalid URL."""

    def __init__(self, url: str, seconds: float) -> None:
        check_url(url, "environment.url")
        self._url, self._seconds = url, seconds
        self._loop, self._http = Loop("tools"), http_client()
        self._open = asyncio.Semaphore(_REQUESTS)

    def ask(self, row: dict[str, Any], turns: list[str]) -> Future[dict[str, Any]]:
        """Return a future of the fields of an :class:`~megatron_fspo.environments.tools.Observation`."""
        return self._loop.submit(self._ask(row, turns))

    async def _ask(self, row: dict[str, Any], turns: list[str]) -> dict[str, Any]:
        asked = {"prompt": row["text"], "turns": turns, "answer": row["answer"], "fields": row["fields"]}
        body = json.dumps(asked).encode("ascii")
        status, content = await attempted(
            lambda: self._attempt(body), ATTEMPTS, first_wait=_FIRST_WAIT, longest_wait=LONGEST_WAIT
        )
        if status != 200:
            raise ValueError(f"status {status}")
        return fields_of(self._url, json.loads(content))

    async def _attempt(self, body: bytes) -> tuple[int, bytes]:
        async with self._open:
            return await post(self._http, self._url, body, seconds=self._seconds, key="environment.seconds")
