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
from megatron_fspo.job.remote import Loop, TryAgain, attempted, http_client
from megatron_fspo.rewards.grade import Failure, Grade, GradeOrFailure, GradeRequest, Verifier, one_line

if TYPE_CHECKING:
    from megatron_fspo.config import Reward

REQUESTS = 64
"""Default of ``reward.concurrency`` for requests."""
_FIRST_WAIT = 0.5  # seconds before the second attempt; then doubles
_LONGEST_WAIT = 30.0
_GRACE_SECONDS = 2.0
_LARGEST = 2**20  # bytes of a reply


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
        said = _said(content)
        if status != 200:
            return request.failure(f"was refused by {self._url} with {status}: {said}")
        if len(content) > _LARGEST:
            return request.failure(f"got more than {_LARGEST} bytes from {self._url}: {said}")
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
        """Return the status and the reply, which is cut soon after ``_LARGEST`` bytes."""
        # Uncompressed: a small compressed reply may expand without limit.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        answer = bytearray()
        try:
            async with (
                self._open,
                asyncio.timeout(self._seconds),
                self._http.stream("POST", self._url, content=body, headers=headers, timeout=None) as response,
            ):
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > _LARGEST:
                        break
        except TimeoutError:
            raise TryAgain(f"no answer in {self._seconds:g} s (reward.seconds)") from None
        except httpx.RequestError as error:
            raise TryAgain(one_line(f"{type(error).__name__} {error}")) from None
        if response.status_code >= 500 or response.status_code == 429:
            raise TryAgain(f"{response.status_code} {_said(bytes(answer))}")
        return response.status_code, bytes(answer)


def check_url(url: str, key: str = "reward.url") -> None:
    """Raise ``InputError`` unless ``url``, the value of ``key``, is an http or https URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{key} = {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"{key} = {url!r}: must be http://host:port/path, or https")


def _said(content: bytes) -> str:
    return one_line(content[:2000].decode("utf-8", "replace"), 200) or "(nothing)"
