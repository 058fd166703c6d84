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

import httpx

from megatron_fspo.environments.tools import Observation
from megatron_fspo.environments.worker import fields_of
from megatron_fspo.job.remote import Loop, TryAgain, attempted, http_client
from megatron_fspo.rewards.remote import check_url

_ATTEMPTS = 4
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
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
        said = await attempted(
            lambda: self._attempt(body), _ATTEMPTS, first_wait=_FIRST_WAIT, longest_wait=_LONGEST_WAIT
        )
        return fields_of(self._url, Observation(**said) if isinstance(said, dict) else said)

    async def _attempt(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        async with self._open:
            try:
                response = await self._http.post(
                    self._url, content=body, headers=headers, timeout=self._seconds
                )
            except httpx.RequestError as error:
                raise TryAgain(f"{type(error).__name__} {error}") from None
        if response.status_code >= 500 or response.status_code == 429:
            raise TryAgain(f"status {response.status_code}")
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        return response.json()
