"""``http``: a verifier behind a URL.

A request is ``{"prompt", "response", "answer", "fields"}`` as JSON. The reply is ``{"reward": number}``, with
``"answer": text`` if majority votes should count that text. Transient errors (a lost connection, a timeout,
429, 5xx) are retried. Others are a :class:`Failure`, which ends the run, so that the policy does not learn
from a verifier that is down.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx

from megatron_fspo.errors import InputError
from megatron_fspo.job.remote import Loop, TryAgain, attempted, excerpt, http_client, one_line, post
from megatron_fspo.rewards.grade import Failure, Grade, GradeOrFailure, GradeRequest, Verifier

if TYPE_CHECKING:
    from megatron_fspo.config import Reward

REQUESTS = 64
"""Default of ``reward.concurrency`` for requests."""
_FIRST_WAIT = 0.5  # seconds before the second attempt; then doubles
_LONGEST_WAIT = 30.0
_GRACE_SECONDS = 2.0


class Remote(Verifier):
    def __init__(self, config: Reward, loop: Loop) -> None:
        assert config.url is not None
        self._url, self._seconds = config.url, config.seconds
        self._attempts = 1 + config.retries
        self._loop = loop
        self._open = asyncio.Semaphore(config.concurrency or REQUESTS)
        self._http = http_client()

    def grade(self, request: GradeRequest) -> Future[GradeOrFailure]:
        return self._loop.submit(self._grade(request))

    def close(self) -> None:
        with suppress(TimeoutError):
            self._loop.submit(self._http.aclose()).result(_GRACE_SECONDS)

    async def _grade(self, request: GradeRequest) -> GradeOrFailure:
        asked = {
            "prompt": request.prompt.text,
            "response": request.response,
            "answer": request.prompt.answer,
            "fields": dict(request.prompt.fields),
        }
        try:
            # ASCII, since UTF-8 cannot encode lone surrogates, which a response may contain.
            body = json.dumps(asked, allow_nan=False).encode("ascii")
        except (TypeError, ValueError) as error:
            return request.failure(f"cannot send the prompt's fields as JSON: {one_line(str(error))}")
        try:
            status, content = await attempted(
                lambda: self._attempt(body),
                self._attempts,
                first_wait=_FIRST_WAIT,
                longest_wait=_LONGEST_WAIT,
            )
        except TryAgain as error:
            last = f"attempt {self._attempts} of {self._attempts}"
            return request.failure(f"got no grade from {self._url}: {error} ({last})")
        except ValueError as error:
            return request.failure(f"got {error}")
        said = excerpt(content)
        if status != 200:
            return request.failure(f"was refused by {self._url} with {status}: {said}")
        try:
            reply = json.loads(content)
            reward, answer = reply["reward"], reply.get("answer")
            sound = isinstance(reward, int | float) and isinstance(answer, str | None)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            return request.failure(
                f'got no {{"reward": number}} with optional "answer": text from {self._url}: {said}'
            )
        score = request.number(reward)
        return score if isinstance(score, Failure) else Grade(score=score, answer=answer)

    async def _attempt(self, body: bytes) -> tuple[int, bytes]:
        async with self._open:
            return await post(self._http, self._url, body, seconds=self._seconds, key="reward.seconds")


def check_url(url: str, key: str = "reward.url") -> None:
    """Raise ``InputError`` unless ``url``, the value of ``key``, is an http or https URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{key} = {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"{key} = {url!r}: must be http://host:port/path, or https")
