"""An environment that works on text: decodes the policy's turns and encodes the replies.

The policy's tokens are never encoded again. Inserted text is encoded separately, between the marks that the
chat template puts around a message, and yields no special tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_fspo.environments.chat import Encoder, added
from megatron_fspo.environments.tools import Observation
from megatron_fspo.environments.worker import BUILT_IN, answer, convert_answer, find_function
from megatron_fspo.errors import InputError
from megatron_fspo.job.parent import clean_environment
from megatron_fspo.job.remote import Endpoint, Loop
from megatron_fspo.rewards.pool import MOST_TASKS, START_SECONDS, KillablePool
from megatron_fspo.types import Prompt, Reply

if TYPE_CHECKING:
    from megatron_fspo.config.environment import Environment


_ATTEMPTS = 4  # of a tool server's answer


class TextEnvironment:
    """A :class:`~megatron_fspo.types.Environment`: a function in worker processes, which start at the first
    call, or a tool server. Raises ``InputError`` if there is no such function, a variable is not set, the
    URL is invalid, or the chat template does not support ``role``.

    A tool server gets ``{"prompt", "turns", "answer", "fields"}`` as JSON. Its answer is text to insert, a
    number (the end, with this reward), null (the end), or an object with fields of an observation.
    """

    def __init__(self, config: Environment, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        assert config.name is not None
        self._server: Endpoint | None = None
        if config.name == "http":
            assert config.url is not None
            self._server = Endpoint(
                config.url, "environment.url", concurrency=64, seconds=config.seconds, attempts=_ATTEMPTS
            )
            self._loop = Loop("tools")
        else:
            find_function(config.name)
        self._config, self._encoder = config, Encoder(tokenizer, stop_token_ids)
        start = 0.0 if config.name == "http" else START_SECONDS
        self.limit_seconds = _ATTEMPTS * (config.seconds + start) + 60.0
        self._variables = clean_environment(config.variables)
        self._before, self._after = ("", "") if config.role is None else frame(tokenizer, config.role)
        self._lock = threading.Lock()
        self._pool: KillablePool | None = None

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        """See the protocol."""
        ended = self._encoder.ended(turns[-1])
        texts = [self._encoder.text(turn) for turn in turns]
        row = {"index": prompt.index, "token_ids": [], "text": prompt.text, "answer": prompt.answer}
        row |= {"fields": dict(prompt.fields), "dataset": prompt.dataset}
        if self._config.name in BUILT_IN:  # a program that the policy wrote could look around for the answer
            row, texts = row | {"text": "", "answer": "", "fields": {}}, texts[-1:]
        began = time.monotonic()

        async def reply(ask: Callable[[], Coroutine[Any, Any, Any]]) -> Reply:
            try:
                reply = self._reply(Observation(**await ask()), prompt, ended)
            except Exception as error:  # a limit was exceeded, the function raised, or its answer is wrong
                text = f"error: {error}".encode("utf-8", "replace").decode()
                reply = self._reply(Observation(text=text, failed=True), prompt, ended)
            return replace(reply, seconds=time.monotonic() - began)

        if self._server is not None:
            return self._loop.submit(reply(partial(self._ask, self._server, prompt, texts)))
        pool = self._workers()
        return pool.loop.submit(reply(partial(pool.call, self._config.name, row, texts)))

    async def _ask(self, server: Endpoint, prompt: Prompt, turns: Sequence[str]) -> dict[str, Any]:
        asked = {"prompt": prompt.text, "turns": turns, "answer": prompt.answer}
        got = await server.post({**asked, "fields": dict(prompt.fields)})
        if got.problem:
            raise ValueError(got.problem)
        return convert_answer(server.url, json.loads(got.content))

    def _workers(self) -> KillablePool:
        with self._lock:
            if self._pool is None:
                config = self._config
                self._pool = KillablePool(
                    f"{answer.__module__}:{answer.__name__}",
                    workers=config.workers,
                    seconds=config.seconds,
                    memory_gb=config.memory_gb,
                    tasks=1 if config.name == "python" else MOST_TASKS,
                    env=self._variables,
                )
            return self._pool

    def _reply(self, observed: Observation, prompt: Prompt, ended: bool) -> Reply:
        """Convert an observation to a reply. ``ended``: a stop token ended the turn."""
        if observed.text is None:
            return Reply(reward=observed.reward, failed=observed.failed)
        most = self._config.inserted_tokens
        if observed.forget:
            words = self._encoder.tokens(("", observed.text), most=most)
            return Reply(token_ids=prompt.token_ids + words, restarts=True, failed=observed.failed)
        ids = self._encoder.tokens((self._before, observed.text, self._after), most=most, ended=ended)
        return Reply(token_ids=ids, failed=observed.failed)


def frame(tokenizer: Any, role: str) -> tuple[str, str]:
    """Return the text that the chat template puts between the policy's turn and a message of ``role``, and
    between that message and the policy's next turn.

    Raises ``InputError`` if the template refuses the role, or rewrites earlier turns, so that the next turn
    would follow another context than the policy wrote.
    """
    question, message = ({"role": speaker, "content": "what is said"} for speaker in ("user", role))
    try:
        parts = added(tokenizer, [question], [message])
    except Exception as error:  # jinja2's errors, and any that a template raises
        raise InputError(
            f"environment.role = {role!r}: the chat template does not support it: {error}"
        ) from error
    if parts is None or len(parts) != 3:
        raise InputError(
            f"environment.role = {role!r}: the chat template rewrites earlier turns (drops thoughts, for "
            "example), so a turn would not follow what the policy wrote: remove environment.role and let the "
            "environment write its own marks"
        )
    return parts[0], parts[2]
