"""Log-probs of sampled responses under a teacher that vLLM servers hold."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.rollout.client.server import Refused, Server, ServerLost
from megatron_fspo.rollout.common import api_key
from megatron_fspo.rollout.engine import Progress
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.types import Completion

_RETRY_SECONDS = 2.0


class TeacherServers:
    """The servers of ``teacher.urls``. Responses are spread over them; if one does not answer, the next is
    asked, for ``vllm.recovery_seconds``."""

    def __init__(self, config: Config) -> None:
        self._loop, self._http = Loop("teacher"), http_client()
        self._servers = [Server(url, self._http, api_key=api_key()) for url in config.teacher.urls]
        self._in_flight = config.vllm.in_flight * len(self._servers)
        self._limit = config.vllm.recovery_seconds

    def score(self, rollout: Rollout, progress: Progress) -> dict[int, Completion]:
        """Return the responses that this rank holds, with the teacher's log-probs.

        Raises:
            TrainingError: no server answered for ``vllm.recovery_seconds``, or one refused a response, as it
                does with a smaller vocabulary.
        """
        places = asyncio.Semaphore(self._in_flight)

        async def scored(number: int) -> Completion:
            response, prompt = rollout.held[number], rollout.prompts[number // rollout.samples]
            ids = [*prompt.token_ids, *response.token_ids]
            ends = [0, *(len(prompt.token_ids) + start for start in response.row_starts), len(ids)]
            values: list[float] = []
            for start, end in pairwise(ends):  # nothing is known of a row's first token, which is context
                async with places:
                    values += [0.0, *await self._ask(number, ids[start:end])]
            progress(1)
            return replace(response, reference=array("f", values[len(prompt.token_ids) :]))

        async def every() -> list[Completion]:
            return await asyncio.gather(*map(scored, rollout.held))

        return dict(zip(rollout.held, self._loop.run(every()), strict=True))

    async def _ask(self, number: int, token_ids: Sequence[int]) -> list[float]:
        too_late = time.monotonic() + self._limit
        while True:
            server = self._servers[number % len(self._servers)]
            try:
                return await server.score(token_ids)
            except ServerLost as error:
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
