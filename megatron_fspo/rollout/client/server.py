"""One vLLM server over HTTP, with retries and typed errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.remote import request
from megatron_fspo.rollout.client.answers import (
    BadAnswer,
    EndedEarly,
    StoppedElsewhere,
    parse,
    read_completion,
    read_prompt_log_probs,
)
from megatron_fspo.rollout.common import MODEL, check_key
from megatron_fspo.types import Completion, SamplingParams

HEALTH_SECONDS = 5.0
REQUEST_SECONDS = 60.0  # control requests; completions and weight updates set their own limit

_LARGEST, _LARGEST_PER_TOKEN = 2**26, 2**14
"""Maximum bytes of an answer: without tokens, and more for each; routes of experts take 3 KB per token."""
_MESSAGE_CHARACTERS = 300  # limit for a server's text in an error message


class ServerLost(TrainingError):
    """No answer: no connection, a time-out, 429 or 5xx at last, or a response that the server ended early."""


class Refused(InputError):
    """The server refused the request (4xx). A retry would not help."""


class Server:
    """A vLLM server.

    Args:
        url: ``http://host:port``.
        http: sends the requests.
        api_key: sent with every request. It does not appear in messages, the repr or logs.

    Raises:
        InputError: an invalid URL, or an invalid key.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, *, api_key: str | None = None) -> None:
        self.url = _checked_url(url)
        self._http = http
        self._key = api_key
        self.ended: Counter[str] = Counter()  # responses that the server ended early, by finish_reason
        self.problem = ""  # why it was not healthy when last asked
        if api_key is not None:
            check_key(api_key)
        # httpx hides this header's value in its own repr.
        self._headers = httpx.Headers({} if api_key is None else {"Authorization": f"Bearer {api_key}"})

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def get(self, route: str, *, timeout: float = REQUEST_SECONDS, attempts: int = 3) -> object:
        """GET ``/route``; see :meth:`post`."""
        return await self._json("GET", route, seconds=timeout, attempts=attempts)

    async def post(
        self,
        route: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float = REQUEST_SECONDS,
        attempts: int = 1,
    ) -> object:
        """POST ``/route?params`` with a JSON body.

        Args:
            route: path, with or without the leading slash.
            body: sent as JSON.
            params: query parameters.
            timeout: seconds for one attempt, from the connection to the last byte.
            attempts: maximum number of attempts. Failed connections, 429 and 5xx are retried, after a
                wait that doubles. A request that timed out is not, as it would take as long again.

        Returns:
            The JSON of the answer, None for an empty one.

        Raises:
            ServerLost: there was no answer.
            Refused: another status than 200, 429 and 5xx; the message has the server's reason.
            BadAnswer: the answer is not JSON, or too long.
        """
        return await self._json("POST", route, json=body, params=params, seconds=timeout, attempts=attempts)

    async def _json(self, method: str, route: str, **how: Any) -> object:
        answer = await self._ask(method, route, largest=_LARGEST, **how)
        with self._reading(route):
            return parse(answer)

    async def healthy(self) -> bool:
        """Return True if ``/health`` answers 200 within 5 seconds; ``problem`` says why not."""
        self.problem = ""
        try:
            await self.get("health", timeout=HEALTH_SECONDS, attempts=1)
        except (ServerLost, Refused, BadAnswer) as error:
            self.problem = str(error)
        return not self.problem

    async def longest(self) -> float:
        """Return the maximum tokens of a sequence; infinite if the server does not say."""
        answer: Any = await self.get("v1/models")
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            return min(n for model in answer["data"] if isinstance(n := model.get("max_model_len"), int))
        return math.inf

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        timeout: float,
        attempts: int = 3,
    ) -> Completion:
        """Return one completion of a prompt, whatever ``params.n`` is. ``timeout``, ``attempts`` and errors
        are as in :meth:`post`. ``seed``, in [0, 2³¹), selects the random stream instead of ``params.seed``.

        Callers must check token ids, as one outside the vocabulary kills a vLLM server. A server with a
        tokenizer stops at ``params.stop`` by itself, which saves it sampling further tokens.
        """
        answer = await self._generate(token_ids, params, {"seed": seed}, timeout, attempts)
        with self._reading():
            with suppress(StoppedElsewhere):
                return read_completion(answer, params, len(token_ids))
            # The server's text differs from ours, such as by a leading space that SentencePiece strips.
            asked = replace(params, stop=())
            answer = await self._generate(token_ids, asked, {"seed": seed}, timeout, attempts)
            return read_completion(answer, params, len(token_ids))

    async def score(self, token_ids: Sequence[int], *, timeout: float = REQUEST_SECONDS) -> list[float]:
        """Return the log-probs of all tokens but the first, at temperature 1, in nats; see :meth:`post`."""
        one_token = SamplingParams(max_tokens=1)
        answer = await self._generate(token_ids, one_token, {"seed": 0, "prompt_logprobs": 0}, timeout, 3)
        with self._reading():
            return read_prompt_log_probs(answer, token_ids)

    async def _generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        more: Mapping[str, object],
        timeout: float,
        attempts: int,
    ) -> bytes:
        sampling: dict[str, object] = {
            "n": 1,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "logprobs": 0,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # only stop_token_ids count, not those of the checkpoint
            "detokenize": bool(params.stop),
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            **more,
        }
        body = {"model": MODEL, "token_ids": list(token_ids), "sampling_params": sampling}
        largest = _LARGEST + _LARGEST_PER_TOKEN * (len(token_ids) + params.max_tokens)
        limits = {"seconds": timeout, "attempts": attempts, "largest": largest}
        return await self._ask("POST", "inference/v1/generate", json=body, **limits)

    def bad_answer(self, route: str, answer: object, wrong: str) -> BadAnswer:
        """Return the error for a route's unexpected answer; ``wrong`` follows the answer in its message."""
        return BadAnswer(f"{self._where(route)}: {self._one_line(repr(answer))} {wrong}")

    def without_key(self, text: str) -> str:
        """Return ``text`` with the key masked, as servers may echo it."""
        return text.replace(self._key, "***") if self._key else text

    def _where(self, route: str) -> str:
        return f"{self.url}/{route.lstrip('/')}".rstrip("/")

    @contextmanager
    def _reading(self, route: str = "") -> Iterator[None]:
        """Add the URL to a :class:`BadAnswer` and mask the key, as the message may quote the answer."""
        try:
            yield
        except BadAnswer as error:
            text = self._one_line(f"{self._where(route)}: {error.args[0]}")
            if not isinstance(error, EndedEarly):
                raise type(error)(text) from None
            self.ended[str(error.args[1])] += 1
            raise ServerLost(text) from None

    async def _ask(self, method: str, route: str, **how: Any) -> bytes:
        """Return the content of the answer to a :func:`request`."""
        where, key = self._where(route), self._headers
        answer = await request(self._http, method, where, headers=key, after_timeout=False, **how)
        if not answer.problem:
            return answer.content
        problem = self._one_line(answer.problem)
        if not answer.transient and answer.status != 200:
            raise Refused(f"{where}: refused with {problem}")
        raise (ServerLost if answer.transient else BadAnswer)(f"{where}: {problem}")

    def _one_line(self, text: str) -> str:
        return " ".join(self.without_key(text).split())[:_MESSAGE_CHARACTERS] or "(no message)"


def _checked_url(url: str) -> str:
    """Return the URL without a trailing slash. Raises ``InputError`` if it is invalid."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"rollout server {url!r}: {error}") from None
    if parsed.userinfo:
        raise InputError(f"rollout server at {parsed.host}: the URL has a password: use VLLM_API_KEY instead")
    whole = url.split() == [url] and not parsed.query and not parsed.fragment
    if parsed.scheme not in ("http", "https") or not parsed.host or not whole:
        raise InputError(f"rollout server {url!r}: must be http://host:port")
    return url.rstrip("/")
