"""Log-probs of sampled responses under a teacher that vLLM servers hold."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.rollout.client.server import Refused, Server, ServerLost
from megatron_fspo.rollout.common import MODEL, api_key
from megatron_fspo.rollout.engine import Progress
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.types import Completion

T = TypeVar("T")
_RETRY_SECONDS = 2.0
_SCORE_SECONDS = 1800.0  # a request waits in the server behind those of all ranks


class TeacherServers:
    """Servers of ``teacher.urls``. Where one does not answer, the next is asked, for
    ``vllm.recovery_seconds``."""

    def __init__(self, inputs: Inputs) -> None:
        """Wait for the servers. Raises ``InputError`` if one decodes ids differently, spaces aside."""
        config, tokenizer = inputs.config, inputs.tokenizer
        self._loop, self._http = Loop("teacher"), http_client()
        self._servers = [Server(url, self._http, api_key=api_key()) for url in config.teacher.urls]
        self._in_flight = config.vllm.in_flight * len(self._servers)
        self._limit = config.vllm.recovery_seconds
        ids = sorted({round(i / 63 * (len(tokenizer) - 1)) for i in range(64)})

        async def decode(server: Server) -> str:
            answer = await server.post("detokenize", {"model": MODEL, "tokens": ids}, attempts=3)
            if isinstance(answer, dict) and isinstance(text := answer.get("prompt"), str):
                return text
            raise server.bad_answer("detokenize", answer, "has no prompt")

        for server in self._servers:
            text = self._loop.run(self._ask([server], 0, decode))
            if text.split() != str(tokenizer.decode(ids)).split():
                raise InputError(f"teacher.urls: {server.url} has another vocabulary than model.checkpoint")
            limit = self._loop.run(self._ask([server], 0, Server.longest))
            longest, keys = config.longest_sequence
            if limit <= longest:  # it samples one more token
                wrong = f"{server.url} scores {limit - 1:.0f} tokens at most, but {keys} = {longest}"
                raise InputError(f"teacher.urls: {wrong}")

    def score(self, rollout: Rollout, progress: Progress) -> dict[int, Completion]:
        """Return this rank's responses with the teacher's log-probs. Raises ``TrainingError`` if no server
        answers, or one refuses a response."""
        places = asyncio.Semaphore(self._in_flight)

        async def scored(number: int) -> Completion:
            response, prompt = rollout.held[number], rollout.prompts[number // rollout.samples]
            ids = [*prompt.token_ids, *response.token_ids]
            ends = [0, *(len(prompt.token_ids) + start for start in response.row_starts), len(ids)]
            values: list[float] = []
            for start, end in pairwise(ends):  # nothing is known of a row's first token, which is context
                async with places:
                    ask = partial(Server.score, token_ids=ids[start:end], timeout=_SCORE_SECONDS)
                    values += [0.0, *await self._ask(self._servers, number, ask)]
            progress(1)
            return replace(response, reference=array("f", values[len(prompt.token_ids) :]))

        async def every() -> list[Completion]:
            return await asyncio.gather(*map(scored, rollout.held))

        return dict(zip(rollout.held, self._loop.run(every()), strict=True))

    async def _ask(self, servers: Sequence[Server], number: int, ask: Callable[[Server], Awaitable[T]]) -> T:
        too_late = float("inf")  # a request may wait long before its server is lost
        while True:
            try:
                return await ask(servers[number % len(servers)])
            except ServerLost as error:
                too_late = min(too_late, time.monotonic() + self._limit)
                if time.monotonic() > too_late:
                    raise TrainingError(
                        f"teacher.urls: {error}; no answer for {self._limit:g} s (vllm.recovery_seconds)"
                    ) from None
                number += 1
                await asyncio.sleep(_RETRY_SECONDS)
            except Refused as error:
                raise TrainingError(
                    f"teacher.urls: {error}. Does the teacher have the policy's vocabulary and length?"
                ) from None
