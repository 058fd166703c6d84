"""A row as a task: how a file is read, its question as chat messages, its answer as text, and the prompt made
of them."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_fspo.config.data import TEMPLATES, Data, DataSet, PresetName, Reading
from megatron_fspo.data.rows import Row, kind
from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Which = Literal["train", "validation"]
"""The training or the evaluation files of a run."""
LONGEST_GRADABLE = 1000
"""Characters of an answer."""
_KEYS = ("prompt_key", "answer_key", "answer_after", "template", "chat_template")
PRESETS: dict[PresetName, tuple[str | bool, ...]] = {
    "raw": ("prompt", "answer", "", "plain", False),
    "dapo": ("prompt", "reward_model.ground_truth", "", "plain", True),
    "math500": ("problem", "answer", "", "boxed", True),
    "aime": ("problem", "answer", "", "boxed", True),
    "amc": ("problem", "answer", "", "boxed", True),
    "gsm8k": ("question", "answer", "####", "boxed", True),
    "slime": ("prompt", "label", "", "plain", True),
}
"""The keys that depend on the format of a file; what they mean is in the configuration. The prompts of DAPO's
and slime's files hold their instruction already; the others are bare questions, and are asked for an answer
in a box."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, and all that says how its rows become prompts. ``template`` is text with ``{prompt}``."""

    file: Path
    name: str
    weight: float | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    answer_after: str = ""
    template: str = "{prompt}"
    chat_template: bool = False
    system_prompt: str = ""
    too_long: str = "error"
    duplicates: str = "drop"
    conflicts: str = "error"


def sources_of(data: Data, which: Which) -> tuple[Source, ...]:
    """Return the files of a run, in the order of the configuration."""
    sets = data.train_sets if which == "train" else data.validation_sets
    return tuple(source_of(data, one) for one in sets)


def source_of(data: Data, one: DataSet) -> Source:
    """Return how the file of a set is read: what the set's table gives holds; else what ``[data]`` gives;
    else what the preset says, the set's own or that of ``[data]``."""
    keys: dict[str, Any] = dict(zip(_KEYS, PRESETS[one.preset or data.preset], strict=True))
    for given in (data, one):
        values = {key: getattr(given, key) for key in Reading.model_fields if key != "preset"}
        keys |= {key: value for key, value in values.items() if value is not None}
    keys["template"] = TEMPLATES.get(keys["template"], keys["template"])
    return Source(file=one.file, name=one.title, weight=one.weight, **keys)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question and its answer."""

    row: Row
    fields: dict[str, Any]
    messages: list[dict[str, Any]]
    """With ``role`` and ``content``, as the file has them; a question that is text is one of the user."""
    answer: str
    """The answer as the file spells it; never blank."""

    @cached_property
    def question(self) -> bytes:
        """Return a digest of the messages: the same for the same question."""
        text = json.dumps(self.messages, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_task(row: Row, source: Source) -> Task:
    """Return the task of a row; ``InputError`` with the file, the line and the field that is wrong."""
    tree = row.tree()
    fields = row.fields(tree)
    messages = _messages(row, _value(row, fields, source.prompt_key), source)
    return Task(row=row, fields=fields, messages=messages, answer=_answer(row, tree, source))


def gradable(answer: str) -> bool:
    """Return whether a verifier of mathematics could read the answer: at most 1,000 characters, a letter or a
    digit among them."""
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
    """Return the messages with the template around the last one of the user, and the system prompt."""
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


def encode(task: Task, source: Source, tokenizer: PreTrainedTokenizerBase) -> tuple[str, tuple[int, ...]]:
    """Return what the model reads, as text and as token ids without a special token added: through the chat
    template up to where the assistant begins, or bare."""
    messages = conversation(task, source)
    text = str(messages[0]["content"])
    if source.chat_template:
        try:
            text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # the template is a program of the checkpoint's and may raise anything
            reason = str(error).strip().partition("\n")[0]
            task.row.fail(f"the chat template refuses {source.prompt_key!r}: {reason}", error)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        task.row.fail(f"{source.prompt_key!r} is empty: it has no tokens ({text[:40]!r})")
    return text, ids


def _value(row: Row, tree: dict[str, Any], key: str) -> Any:
    """Return the value of a key; one with dots that is not there as it stands leads into objects."""
    if key in tree:
        return tree[key]
    value: Any = tree
    way: list[str] = []
    for name in key.split("."):
        if not isinstance(value, dict):
            row.fail(f"no key {key!r}: {'.'.join(way)!r} is {kind(value)}")
        if name not in value:
            place = f"in {'.'.join(way)!r}" if way else "here"
            names = [repr(key[:40]) for key in list(value)[:12]] + ["…"] * (len(value) > 12)
            row.fail(f"no key {key!r}; the keys {place} are {', '.join(names) or 'none'}")
        value = value[name]
        way.append(name)
    return value


def _messages(row: Row, prompt: Any, source: Source) -> list[dict[str, Any]]:
    key = source.prompt_key
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
        and all(isinstance(one.get("content"), str) for one in messages)
    ):
        held = json.dumps(prompt)[:80] if isinstance(prompt, list) else kind(prompt)
        row.fail(
            f"{key!r} must be a string or a list of messages, objects with the strings"
            f" 'role' and 'content'; found {held}"
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


def _answer(row: Row, tree: dict[str, Any], source: Source) -> str:
    key = source.answer_key
    value = _value(row, tree, key)
    # Numbers of JSON lines are text already, spelled as in the file.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, str) or is_number):
        row.fail(f"{key!r} must be a string or a number, found {kind(value)}")
    answer = str(value) if isinstance(value, str) else repr(value)
    if mark := source.answer_after:
        _, has_mark, answer = answer.rpartition(mark)
        if not has_mark:
            row.fail(f"{key!r} has no {mark!r}, which the answer should follow")
        answer = answer.strip()
    if not answer.strip():
        row.fail(f"{key!r} is empty: there is nothing to compare a response with")
    return answer
