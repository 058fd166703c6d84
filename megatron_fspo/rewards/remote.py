"""``http``: a verifier behind a URL.

A request is ``{"prompt", "response", "answer", "fields"}`` as JSON. The reply is ``{"reward": number}``, with
``"answer": text`` if majority votes should count that text. Transient errors (a lost connection, a timeout,
429, 5xx) are retried. Others are a :class:`Failure`, which ends the run, so that the policy does not learn
from a verifier that is down.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from megatron_fspo.job.remote import Endpoint, Loop, one_line
from megatron_fspo.rewards.grade import Failure, Grade, GradeOrFailure, GradeRequest, Verifier

if TYPE_CHECKING:
    from megatron_fspo.config import Reward

REQUESTS = 64
"""Default of ``reward.concurrency`` for requests."""
_GRACE_SECONDS = 2.0


class Remote(Verifier):
    def __init__(self, config: Reward, loop: Loop) -> None:
        assert config.url is not None
        self._endpoint = Endpoint(
            config.url,
            "reward.url",
            concurrency=config.concurrency or REQUESTS,
            seconds=config.seconds,
            attempts=1 + config.retries,
        )
        self._loop = loop

    def grade(self, request: GradeRequest) -> Future[GradeOrFailure]:
        return self._loop.submit(self._grade(request))

    def close(self) -> None:
        with suppress(TimeoutError):
            self._loop.submit(self._endpoint.http.aclose()).result(_GRACE_SECONDS)

    async def _grade(self, request: GradeRequest) -> GradeOrFailure:
        prompt, url = request.prompt, self._endpoint.url
        asked = {"prompt": prompt.text, "response": request.response, "answer": prompt.answer}
        try:
            got = await self._endpoint.post({**asked, "fields": dict(prompt.fields)})
        except (TypeError, ValueError) as error:
            return request.failure(f"cannot send the prompt's fields as JSON: {one_line(str(error))}")
        if got.problem:
            return request.failure(f"got no grade from {url}: {one_line(got.problem)}")
        try:
            reply = json.loads(got.content)
            reward, answer = reply["reward"], reply.get("answer")
            sound = isinstance(reward, int | float) and isinstance(answer, str | None)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            said = one_line(got.content[:2000].decode("utf-8", "replace"), 200) or "(nothing)"
            return request.failure(
                f'got no {{"reward": number}} with optional "answer": text from {url}: {said}'
            )
        score = request.number(reward)
        return score if isinstance(score, Failure) else Grade(score=score, answer=answer)
