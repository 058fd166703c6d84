"""Encodes conversations: a chat template's marks, and text between them that yields no special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_STAND_IN = re.compile("\ue000([0-9]+)\ue001")
_THOUGHT = "<think>so</think>\ue002"

Message = Mapping[str, str]
"""``role`` and ``content``."""
Parts = Sequence[str]
"""Alternately the template's marks and the text of a message; begins and ends with marks."""


class Encoder:
    """Decodes turns, and encodes text to insert between them."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        self._special = self._stops.union(tokenizer.all_special_ids)

    def text(self, turn: Sequence[int]) -> str:
        """Return the text of a turn, without the stop token that ended it."""
        ids = turn[:-1] if self.ended(turn) else turn
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def ended(self, turn: Sequence[int]) -> bool:
        """Return True if a stop token ended the turn."""
        return bool(turn) and turn[-1] in self._stops

    def tokens(self, parts: Parts, *, most: int | None = None, ended: bool = False) -> tuple[int, ...]:
        """Encode ``parts``, with at most ``most`` tokens of each message. ``ended``: a stop token ended the
        turn before, so a stop token at the start is dropped."""
        ids: list[int] = []
        for number, text in enumerate(parts):
            words = number % 2 == 1
            part: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=words)[
                "input_ids"
            ]
            # Some tokenizers still encode the text of a special token as that token.
            ids += [token for token in part if token not in self._special][:most] if words else part
        return tuple(ids[1:] if ended and ids and ids[0] in self._stops else ids)


def render(tokenizer: Any, messages: Sequence[Message]) -> list[str]:
    """Render a conversation up to the policy's next turn, as :data:`Parts`. Assistant messages are in the
    marks, since templates inspect them; the text of special tokens is removed from them."""
    talk = [dict(message) for message in _stood_in(messages)]
    for message in talk:
        if message["role"] == "assistant":
            message["content"] = messages[int(_STAND_IN.findall(message["content"])[0])]["content"]
            for special in tokenizer.all_special_tokens:
                message["content"] = message["content"].replace(special, "")
    return _parts(_template(tokenizer, talk), messages)


def added(tokenizer: Any, before: Sequence[Message], new: Sequence[Message]) -> list[str] | None:
    """Return what the template writes between the policy's answer to ``before`` and its answer to ``new``, as
    :data:`Parts`; None if the template rewrites the conversation before it (drops thoughts, for example)."""
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
