"""An environment that reads and writes text: the policy's turns become text, and its answers become tokens.

What a policy wrote is never encoded again. What is inserted is encoded by itself, between the marks that the
chat template puts around a message; no text of a tool makes a special token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_fspo.environments.tools import Observation
from megatron_fspo.environments.worker import answer, function_of
from megatron_fspo.errors import InputError
from megatron_fspo.rewards.pool import MOST_TASKS, KillablePool
from megatron_fspo.types import Prompt, Reply

if TYPE_CHECKING:
    from megatron_fspo.config.environment import Environment

_QUESTION, _ANSWER, _TOOL = "A question?", "<think>so</think>An answer.", "What a tool said."


class TextEnvironment:
    """A :class:`~megatron_fspo.types.Environment`: a function in worker processes, which begin at the first
    call.

    Raises:
        InputError: there is no such function, or the chat template cannot be followed by ``role``.
    """

    def __init__(self, config: Environment, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        assert config.name is not None
        function_of(config.name)
        self._config, self._tokenizer = config, tokenizer
        self._stops = frozenset(stop_token_ids)
        before, after = ("", "") if config.role is None else frame(tokenizer, config.role)
        self._after = self._marks(after)
        # A turn that ended by a stop token has written the first of these marks itself.
        self._before = self._marks(before)
        self._special = self._stops.union(tokenizer.all_special_ids)
        self._lock = threading.Lock()
        self._pool: KillablePool | None = None

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Reply]:
        """See the protocol."""
        ended = bool(turns[-1]) and turns[-1][-1] in self._stops
        texts = [self._text(turn) for turn in turns]
        row = {"index": prompt.index, "token_ids": [], "text": prompt.text, "answer": prompt.answer}
        row |= {"fields": dict(prompt.fields), "dataset": prompt.dataset}
        result: Future[Reply] = Future()
        began = time.monotonic()

        def settle(work: Future[Any]) -> None:
            try:
                observed = Observation(**work.result())
            except CancelledError:
                result.cancel()
                return
            except Exception as error:  # a limit, or the function's own
                observed = Observation(text=f"error: {error}", failed=True)
            with suppress(InvalidStateError):  # whoever asked has stopped
                reply = self._reply(observed, prompt, ended)
                result.set_result(replace(reply, seconds=time.monotonic() - began))

        self._workers().submit(self._config.name, row, texts).add_done_callback(settle)
        return result

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
                )
            return self._pool

    def _text(self, turn: Sequence[int]) -> str:
        ids = turn[:-1] if turn and turn[-1] in self._stops else turn
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _reply(self, observed: Observation, prompt: Prompt, ended: bool) -> Reply:
        """What is inserted after a turn that ended by a stop token, or did not."""
        if observed.text is None:
            return Reply(reward=observed.reward, failed=observed.failed)
        encoded = self._tokenizer(observed.text, add_special_tokens=False, split_special_tokens=True)
        # A tokenizer may have no other token for such a text.
        words = [token for token in encoded["input_ids"] if token not in self._special]
        del words[self._config.inserted_tokens :]
        if observed.forget:
            return Reply(token_ids=(*prompt.token_ids, *words), restarts=True, failed=observed.failed)
        before = self._before
        if ended and before and before[0] in self._stops:
            before = before[1:]
        return Reply(token_ids=(*before, *words, *self._after), failed=observed.failed)

    def _marks(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def environment_of(
    config: Environment, tokenizer: Any, stop_token_ids: Sequence[int]
) -> TextEnvironment | None:
    """The environment of a configuration; None where it names none. Raises as :class:`TextEnvironment`."""
    return None if config.name is None else TextEnvironment(config, tokenizer, stop_token_ids)


def frame(tokenizer: Any, role: str) -> tuple[str, str]:
    """What the chat template puts between the policy's words and those of a message of ``role``, and between
    these and the policy's next words.

    Raises:
        InputError: the template refuses the role, or writes the conversation before it anew: by another
            history the policy would be asked for the next turn than it was for the last.
    """
    question = [{"role": "user", "content": _QUESTION}]
    talk = [*question, {"role": "assistant", "content": _ANSWER}, {"role": role, "content": _TOOL}]
    try:
        short, long = (
            tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=True)
            for some in (question, talk)
        )
    except Exception as error:  # jinja2's, and whatever a template raises
        raise InputError(
            f"environment.role = {role!r}: the chat template does not take it: {error}"
        ) from error
    before, words, after = long.removeprefix(short + _ANSWER).partition(_TOOL)
    if not long.startswith(short + _ANSWER) or not words:
        raise InputError(
            f"environment.role = {role!r}: the chat template writes earlier turns anew (it drops thoughts, "
            "say), so a turn would not follow what the policy wrote: leave role out, and have the "
            "environment write its own marks"
        )
    return before, after
