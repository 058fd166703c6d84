"""The prompt file, and the order in which a run works through it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    chat_template: bool = False,
    max_prompt_tokens: int,
) -> tuple[Prompt, ...]:
    """Read a jsonl file, one object a line, blank lines aside; ``prompts[i].index == i``.

    The prompt is a string, taken as it stands. With ``chat_template`` it goes through the tokenizer's
    template, as one user message or as a list of messages (objects with ``role`` and ``content``), up to
    where the assistant begins. The answer is a string or a number, and stays as it is written (``1.50``).

    No special token is added to either: the template writes its own, and a raw prompt is exactly what the
    file says. Qwen3 has no BOS; for a model that wants one in front of a raw prompt, write it in the file.

    Raises ``InputError`` with the file, the line and what is wrong with it.
    """
    if chat_template and tokenizer.chat_template is None:
        raise InputError(f"{path}: chat_template is true, but the tokenizer has no chat template")
    prompts: list[Prompt] = []
    for line in _lines(Path(path)):
        row = line.parse()
        text = _prompt_text(line, line.value(row, prompt_key), prompt_key, chat_template, tokenizer)
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not token_ids:
            line.fail(f"{prompt_key!r} is empty: it has no tokens ({text[:40]!r})")
        if len(token_ids) > max_prompt_tokens:
            line.fail(f"{prompt_key!r} has {len(token_ids)} tokens, max_prompt_tokens is {max_prompt_tokens}")
        answer = line.value(row, answer_key)
        if not isinstance(answer, str):
            line.fail(f"{answer_key!r} must be a string or a number, found {_kind(answer)}")
        prompts.append(Prompt(index=len(prompts), token_ids=token_ids, text=text, answer=str(answer)))
    if not prompts:
        raise InputError(f"{path}: holds no prompts")
    return tuple(prompts)


class _Number(str):
    """A JSON number as the file spells it: no digit is lost, and no digit count is too large."""


@dataclass(frozen=True)
class _Line:
    """One line of the file and where it stands."""

    path: Path
    number: int
    raw: bytes

    def fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise InputError(f"{self.path}:{self.number}: {what}") from cause

    def parse(self) -> dict[str, Any]:
        try:
            row = json.loads(self.raw.decode("utf-8"), parse_int=_Number, parse_float=_Number)
            json.dumps(row, ensure_ascii=False).encode("utf-8")  # "\ud800" is JSON, but no tokenizer takes it
        except UnicodeError as error:
            self.fail(f"not UTF-8: {error}", error)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}", error)
        if not isinstance(row, dict):
            self.fail(f"not an object but {_kind(row)}")
        return row

    def value(self, row: dict[str, Any], key: str) -> Any:
        if key not in row:
            self.fail(f"no key {key!r}; the keys here are {', '.join(map(repr, row)) or 'none'}")
        return row[key]


def _lines(path: Path) -> Iterator[_Line]:
    """The lines that are not blank, numbered from 1 as editors do. Only a line feed ends a line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield _Line(path, number, raw)
    except OSError as error:
        raise InputError(f"{path}: cannot read the prompts: {error.strerror}") from error


def _prompt_text(
    line: _Line, prompt: Any, key: str, chat_template: bool, tokenizer: PreTrainedTokenizerBase
) -> str:
    if not chat_template:
        if type(prompt) is not str:
            hint = "; with chat_template it may be a list of messages" if isinstance(prompt, list) else ""
            line.fail(f"{key!r} must be a string, found {_kind(prompt)}{hint}")
        return prompt
    messages = [{"role": "user", "content": prompt}] if type(prompt) is str else prompt
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        found = json.dumps(prompt)[:80] if isinstance(prompt, list) else _kind(prompt)
        line.fail(
            f"{key!r} must be a string or a list of messages, objects with the strings"
            f" 'role' and 'content'; found {found}"
        )
    if not any(message["content"] for message in messages):
        line.fail(f"{key!r} is empty: no message has content")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # the template is a program of the checkpoint's and may raise anything
        reason = str(error).strip().partition("\n")[0]
        line.fail(f"the chat template refuses {key!r}: {reason}", error)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(type(message.get(key)) is str for key in ("role", "content"))


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's own words."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        _Number: "a number",
        float: "NaN or an infinity",
        str: "a string",
        list: "a list",
    }
    return names.get(type(value), "an object")


class PromptCursor:
    """An endless walk over ``num_prompts`` prompt indices that can be stopped and resumed anywhere.

    Each epoch has an order that depends on ``(seed, epoch)`` alone; without ``shuffle`` it is the file's.

    Raises ``InputError`` if there are no prompts.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise InputError(f"at least one prompt is needed, found {num_prompts}")
        self._identity = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self._seek(epoch=0, offset=0)

    def _seek(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._order = list(range(self._identity["num_prompts"]))
        if self._identity["shuffle"]:
            # A string seeds the generator through SHA-512: neighbouring seeds and epochs share nothing.
            random.Random(f"{self._identity['seed']}/{epoch}").shuffle(self._order)

    def take(self, n: int) -> list[int]:
        """The next ``n`` prompt indices, each once: ``ValueError`` if there are fewer prompts.

        Shuffled, what is left of an epoch but too short for the batch is skipped, and no prompt for good,
        since every epoch has another order. Unshuffled, the batch goes on at the top of the file.
        """
        if n > len(self._order):
            raise ValueError(f"{n} prompts at once, but there are only {len(self._order)}")
        if self._identity["shuffle"] and self._offset + n > len(self._order):
            self._seek(self._epoch + 1, 0)
        taken: list[int] = []
        while len(taken) < n:
            step = self._order[self._offset : self._offset + n - len(taken)]
            taken += step
            self._offset += len(step)
            if self._offset == len(self._order):
                self._seek(self._epoch + 1, 0)
        return taken

    def state_dict(self) -> dict[str, int]:
        """Where the walk stands, and over what: integers and a boolean, for JSON."""
        return {"epoch": self._epoch, "offset": self._offset, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; ``InputError`` if it comes from other data, another seed or another order."""
        legal = {"epoch", "offset", *self._identity}
        if set(state) != legal:
            raise InputError(f"prompt cursor: the state has the keys {sorted(state)}, not {sorted(legal)}")
        for key, mine in self._identity.items():
            if state[key] != mine:
                raise InputError(
                    f"prompt cursor: the checkpoint has {key} = {state[key]!r}, this run {mine!r};"
                    " resume with the same data and seed, or start a new run"
                )
        epoch, offset = state["epoch"], state["offset"]
        if not (type(epoch) is type(offset) is int and epoch >= 0 and 0 <= offset < len(self._order)):
            raise InputError(
                f"prompt cursor: epoch {epoch!r}, offset {offset!r} is no place in {len(self._order)} prompts"
            )
        self._seek(epoch, offset)
