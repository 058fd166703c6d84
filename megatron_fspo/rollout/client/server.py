"""One vLLM server over HTTP: what is tried again, what is lost, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.remote import TryAgain, attempted
from megatron_fspo.rollout.client.answers import (
    BadAnswer,
    StoppedElsewhere,
    parse,
    read_completion,
    read_prompt_log_probs,
)
from megatron_fspo.rollout.common import MODEL, check_key
from megatron_fspo.types import Completion, SamplingParams

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
REQUEST_SECONDS = 60.0  # a control request; completions and weight updates bring their own limit

_FIRST_WAIT = 0.25  # seconds before the second attempt; it doubles from there
_LONGEST_WAIT = 8.0
_MESSAGE_CHARACTERS = 300  # of what a server says, in an error message


class ServerLost(TrainingError):
    """No usable answer: connection lost, no answer in time, or 5xx to the last attempt."""


class Refused(InputError):
    """The server understood and said no (4xx). Asking again would not help."""


class Server:
    """A vLLM server.

    Args:
        url: ``http://host:port``.
        http: sends the requests.
        api_key: what the server asks for, on every route. It is in no message, repr or log.

    Raises:
        InputError: not such a URL, or a key that does not fit into a header.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, *, api_key: str | None = None) -> None:
        self.url = _checked_url(url)
        self._http = http
        self._key = api_key
        if api_key is not None:
            check_key(api_key)
        # httpx hides this header's value in its own repr.
        self._headers = httpx.Headers({} if api_key is None else {"Authorization": f"Bearer {api_key}"})

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def get(self, route: str, *, timeout: float = REQUEST_SECONDS, attempts: int = 3) -> object:
        """GET ``/route``; see :meth:`post`."""
        return await self._json("GET", route, None, None, timeout, attempts)

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
            route: without the leading slash.
            body: sent as JSON.
            params: the query's.
            timeout: seconds for one attempt, from the connection to the last byte.
            attempts: how often at most. Tried again, after a wait that doubles, are lost connections and 5xx;
                a request that did not answer in time is not, it would take as long again.

        Returns:
            The JSON of the answer, None for an empty one.

        Raises:
            ServerLost: no attempt was answered.
            Refused: 4xx, with what the server said.
            BadAnswer: the answer is not JSON.
        """
        return await self._json("POST", route, body, params, timeout, attempts)

    async def _json(self, method: str, route: str, *how: Any) -> object:
        answer = await self._ask(method, route, *how)
        with self._reading(route):
            return parse(answer)

    async def healthy(self) -> bool:
        """Return True if ``/health`` answers 200 within 5 seconds."""
        try:
            await self.get("health", timeout=HEALTH_SECONDS, attempts=1)
        except (ServerLost, Refused, BadAnswer):
            return False
        return True

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        timeout: float,
        attempts: int = 3,
    ) -> Completion:
        """Return one completion of a prompt (``params.n`` is not looked at); raises like :meth:`post`, as
        ``timeout`` and ``attempts`` have it there. ``seed``, in [0, 2³¹), names the random stream, instead of
        ``params.seed``.

        A token id outside the vocabulary kills a vLLM server: the caller has checked them. A server with a
        tokenizer stops at ``params.stop`` by itself, which saves what others go on to sample.
        """
        answer = await self._generate(token_ids, params, {"seed": seed}, timeout, attempts)
        with self._reading():
            with suppress(StoppedElsewhere):
                return read_completion(answer, params, len(token_ids))
            # Its text is not ours, such as by a space that SentencePiece takes off the front of a text.
            asked = replace(params, stop=())
            answer = await self._generate(token_ids, asked, {"seed": seed}, timeout, attempts)
            return read_completion(answer, params, len(token_ids))

    async def score(self, token_ids: Sequence[int], *, timeout: float = REQUEST_SECONDS) -> list[float]:
        """Log-probs of all tokens but the first, given those before, at temperature 1, in nats.

        Raises like :meth:`post`.
        """
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
            "ignore_eos": True,  # stop_token_ids say it all, whatever the server read in the checkpoint
            "detokenize": bool(params.stop),
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            **more,
        }
        body = {"model": MODEL, "token_ids": list(token_ids), "sampling_params": sampling}
        return await self._ask("POST", "inference/v1/generate", body, None, timeout, attempts)

    def bad_answer(self, route: str, answer: object, wrong: str) -> BadAnswer:
        """The error for what a route answered and should not have; ``wrong`` says why not."""
        return BadAnswer(f"{self._where(route)}: {self._one_line(repr(answer))} {wrong}")

    def without_key(self, text: str) -> str:
        """``text``, which may repeat what a server said, for a message."""
        return text.replace(self._key, "***") if self._key else text

    def _where(self, route: str) -> str:
        return f"{self.url}/{route.lstrip('/')}".rstrip("/")

    @contextmanager
    def _reading(self, route: str = "") -> Iterator[None]:
        """Name the server in what is wrong with its answer, of which the message may show some."""
        try:
            yield
        except BadAnswer as error:
            raise type(error)(self._one_line(f"{self._where(route)}: {error}")) from None

    async def _ask(
        self,
        method: str,
        route: str,
        body: Mapping[str, object] | None,
        params: Mapping[str, str] | None,
        timeout: float,
        attempts: int,
    ) -> bytes:
        where = self._where(route)
        request = self._http.build_request(
            method,
            where,
            json=body,
            params=params,
            headers=self._headers,
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout), pool=None),
        )

        async def attempt() -> bytes:
            try:
                async with asyncio.timeout(timeout):
                    response = await self._http.send(request)
            except httpx.ConnectTimeout:
                raise TryAgain("no connection in time") from None
            except (httpx.TimeoutException, TimeoutError):
                raise ServerLost(f"{where}: no answer in {timeout:g} s") from None
            except httpx.TransportError as error:
                raise TryAgain(self._one_line(f"{type(error).__name__} {error}")) from None
            except httpx.RequestError as error:  # a body that does not unpack
                raise BadAnswer(f"{where}: {self._one_line(str(error))}") from None
            if response.status_code >= 500:
                raise TryAgain(f"{response.status_code} {self._said(response)}")
            if response.status_code != 200:
                raise Refused(f"{where}: refused with {response.status_code}: {self._said(response)}")
            return response.content

        try:
            return await attempted(attempt, attempts, first_wait=_FIRST_WAIT, longest_wait=_LONGEST_WAIT)
        except TryAgain as error:
            tries = "" if attempts == 1 else f" (attempt {attempts} of {attempts})"
            raise ServerLost(f"{where}: {error}{tries}") from None

    def _said(self, response: httpx.Response) -> str:
        """The server's reason, on one line; a server may echo anything."""
        text = response.content[:10_000].decode("utf-8", "replace")
        try:
            said = json.loads(text)["error"]["message"]
        except (ValueError, RecursionError, KeyError, TypeError, IndexError):
            said = text
        return self._one_line(str(said))

    def _one_line(self, text: str) -> str:
        return " ".join(self.without_key(text).split())[:_MESSAGE_CHARACTERS] or "(no message)"


def _checked_url(url: str) -> str:
    """The URL without a slash at the end."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"rollout server {url!r}: {error}") from None
    if parsed.userinfo:
        raise InputError(f"rollout server at {parsed.host}: a URL with a password in it; use the API key")
    whole = url.split() == [url] and not parsed.query and not parsed.fragment
    if parsed.scheme not in ("http", "https") or not parsed.host or not whole:
        raise InputError(f"rollout server {url!r}: must be http://host:port")
    return url.rstrip("/")
