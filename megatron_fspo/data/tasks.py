"""A row as a task: its question as chat messages, its answer as text, and the prompt made of them."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fspo.data.presets import Source
from megatron_fspo.data.rows import Row, kind
from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_GRADABLE = 1000
"""Characters of an answer."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a row asks, and what is right."""

    row: Row
    fields: dict[str, Any]
    messages: list[dict[str, Any]]
    """With ``role`` and ``content``, as the file has them; a question that is text is one of the user."""
    answer: str
    """As the file spells it; never blank."""

    @property
    def question(self) -> bytes:
        """A digest of the messages: the same for the same question."""
        text = json.dumps(self.messages, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_task(row: Row, source: Source) -> Task:
    """Raises ``InputError`` with the file, the line and the field that is wrong."""
    tree = row.tree()
    fields = row.fields(tree)
    messages = _messages(row, _value(row, fields, source.prompt_key), source)
    return Task(row=row, fields=fields, messages=messages, answer=_answer(row, tree, source))


def gradable(answer: str) -> bool:
    """Whether a verifier of mathematics could read the answer: at most 1,000 characters, a letter or a digit
    among them."""
    return len(answer) <= LONGEST_GRADABLE and any(character.isalnum() for character in answer)


def check_source(source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``InputError`` if no prompt of the source could be rendered, whatever its rows say."""
    if source.chat_template and tokenizer.chat_template is None:
        raise InputError(f"{source.file}: chat_template is true, but the tokenizer has no chat template")
    if source.system_prompt and not source.chat_template:
        raise InputError(
            f"{source.file}: system_prompt needs chat_template = true; else put the words into template"
        )


def conversation(task: Task, source: Source) -> list[dict[str, Any]]:
    """The messages with the words of the template around the last of the user, and the system prompt."""
    messages = [dict(message) for message in task.messages]
    if source.template != "{prompt}":
        asked = [message for message in messages if message["role"] == "user"]
        if not asked:
            task.row.fail(f"{source.prompt_key!r} has no message of the user to put the template around")
        asked[-1]["content"] = source.template.replace("{prompt}", asked[-1]["content"])
    if not source.system_prompt:
        return messages
    if messages[0]["role"] == "system":
        task.row.fail(f"{source.prompt_key!r} has a system message, and so has system_prompt")
    return [{"role": "system", "content": source.system_prompt}, *messages]


def render(task: Task, source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model reads, as text: through the chat template, up to where the assistant begins, or bare."""
    messages = conversation(task, source)
    if not source.chat_template:
        return str(messages[0]["content"])
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # the template is a program of the checkpoint's and may raise anything
        reason = str(error).strip().partition("\n")[0]
        task.row.fail(f"the chat template refuses {source.prompt_key!r}: {reason}", error)


def tokens(task: Task, text: str, source: Source, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Of the text, no special token added; ``InputError`` if there are none."""
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        task.row.fail(f"{source.prompt_key!r} is empty: it has no tokens ({text[:40]!r})")
    return ids


def _value(row: Row, tree: dict[str, Any], key: str) -> Any:
    """What the key names; a key with dots that is not there as it stands leads into objects."""
    if key in tree:
        return tree[key]
    found: Any = tree
    way: list[str] = []
    for part in key.split("."):
        if not isinstance(found, dict):
            row.fail(f"no key {key!r}: {'.'.join(way)!r} is {kind(found)}")
        if part not in found:
            inside = f" in {'.'.join(way)!r}" if way else ""
            row.fail(f"no key {key!r}; the keys{inside or ' here'} are {_listed(found)}")
        found = found[part]
        way.append(part)
    return found


def _listed(keys: dict[str, Any]) -> str:
    names = [repr(key[:40]) for key in list(keys)[:12]]
    return ", ".join(names + ["…"] * (len(keys) > 12)) or "none"


def _messages(row: Row, prompt: Any, source: Source) -> list[dict[str, Any]]:
    key = source.prompt_key
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        found = json.dumps(prompt)[:80] if isinstance(prompt, list) else kind(prompt)
        row.fail(
            f"{key!r} must be a string or a list of messages, objects with the strings"
            f" 'role' and 'content'; found {found}"
        )
    if not any(message["content"] for message in messages):
        row.fail(f"{key!r} is empty: it has no text")
    if not source.chat_template and [message["role"] for message in messages] != ["user"]:
        roles = ", ".join(message["role"][:20] for message in messages[:8])
        row.fail(
            f"{key!r} must be a string or one message of the user, found messages of {roles}; "
            "with chat_template it may be a list of messages"
        )
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _answer(row: Row, tree: dict[str, Any], source: Source) -> str:
    key = source.answer_key
    value = _value(row, tree, key)
    # Numbers of JSON lines are text already, spelled as in the file.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, str) or is_number):
        row.fail(f"{key!r} must be a string or a number, found {kind(value)}")
    answer = str(value) if isinstance(value, str) else repr(value)
    if mark := source.answer_after:
        _, found, answer = answer.rpartition(mark)
        if not found:
            row.fail(f"{key!r} has no {mark!r}, which the answer should follow")
        answer = answer.strip()
    if not answer.strip():
        row.fail(f"{key!r} is empty: there is nothing to compare a response with")
    return answer
