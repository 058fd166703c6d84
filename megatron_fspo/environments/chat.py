"""A conversation as tokens: the marks of a chat template, and between them words that make no mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_STAND_IN = re.compile("\ue000([0-9]+)\ue001")
_THOUGHT = "<think>so</think>\ue002"

Message = Mapping[str, str]
"""``role`` and ``content``."""
Parts = Sequence[str]
"""In turn marks of the template and words of a message; marks come first and last."""


class Encoder:
    """Reads turns, and encodes what is inserted between them."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        self._special = self._stops.union(tokenizer.all_special_ids)

    def text(self, turn: Sequence[int]) -> str:
        """The text of a turn, without the stop token that ended it."""
        ids = turn[:-1] if self.ended(turn) else turn
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def ended(self, turn: Sequence[int]) -> bool:
        """True if a stop token ended the turn."""
        return bool(turn) and turn[-1] in self._stops

    def tokens(self, parts: Parts, *, most: int | None = None, ended: bool = False) -> tuple[int, ...]:
        """Encode marks and words, at most so many tokens of each message; after a turn that a stop token
        ``ended``, the first mark is not written twice."""
        ids: list[int] = []
        for number, text in enumerate(parts):
            words = number % 2 == 1
            part: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=words)[
                "input_ids"
            ]
            # A tokenizer may have no other token for such a text.
            ids += [token for token in part if token not in self._special][:most] if words else part
        return tuple(ids[1:] if ended and ids and ids[0] in self._stops else ids)


def render(tokenizer: Any, messages: Sequence[Message]) -> list[str]:
    """A conversation, up to where the policy goes on, in :data:`Parts`. What assistants said is among the
    marks, as templates look into it, without the text of special tokens."""
    talk = [dict(message) for message in _stood_in(messages)]
    for message in talk:
        if message["role"] == "assistant":
            message["content"] = messages[int(_STAND_IN.findall(message["content"])[0])]["content"]
            for special in tokenizer.all_special_tokens:
                message["content"] = message["content"].replace(special, "")
    return _parts(_template(tokenizer, talk), messages)


def added(tokenizer: Any, before: Sequence[Message], new: Sequence[Message]) -> list[str] | None:
    """What the template writes between the policy's answer to ``before`` and its answer to the ``new``
    messages, in :data:`Parts`; None where it writes what was before them anew (drops thoughts, say)."""
    talk = _stood_in([*before, *new])
    first, last = talk[: len(before)], talk[len(before) :]
    start = _template(tokenizer, first) + _THOUGHT
    whole = _template(tokenizer, [*first, {"role": "assistant", "content": _THOUGHT}, *last])
    return _parts(whole.removeprefix(start), [*before, *new]) if whole.startswith(start) else None


def _stood_in(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": f"\ue000{i}\ue001"} for i, message in enumerate(messages)]


def _parts(text: str, messages: Sequence[Message]) -> list[str]:
    parts = _STAND_IN.split(text)
    return [messages[int(part)]["content"] if i % 2 else part for i, part in enumerate(parts)]


def _template(tokenizer: Any, messages: Sequence[Message]) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text
