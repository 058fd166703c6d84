"""A row as a task: question as chat messages, answer as text, and the prompt rendered from them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_fspo.config.data import TEMPLATES, Data, DataSet, PresetName, Reading
from megatron_fspo.data.rows import MEDIA, Row, kind
from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Which = Literal["train", "validation"]
"""The training or the evaluation files of a run."""
LONGEST_GRADABLE = 1000
"""Most characters of a gradable answer."""
_OWN_VARIABLES = {"messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict"}
_KEYS = ("prompt_key", "answer_key", "answer_after", "template", "chat_template")
PRESETS: dict[PresetName, tuple[str | bool, ...]] = {
    "raw": ("prompt", "answer", "", "plain", False),
    "dapo": ("prompt", "reward_model.ground_truth", "", "plain", True),
    "math500": ("problem", "answer", "", "boxed", True),
    "aime": ("problem", "answer", "", "boxed", True),
    "amc": ("problem", "answer", "", "boxed", True),
    "gsm8k": ("question", "answer", "####", "boxed", True),
    "slime": ("prompt", "label", "", "plain", True),
    "messages": ("messages", "", "", "plain", True),
    "completion": ("prompt", "completion", "", "plain", False),
}
"""For each file format, the values of ``_KEYS``. The prompts in DAPO's and slime's files include
instructions; the others are bare questions, and their template asks for an answer in a box. The last two are
for supervised training: whole conversations, or prompts and responses."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, and how its rows become prompts. ``template`` is text with ``{prompt}``."""

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
    responses: bool = False
    """The rows have responses to learn, and no answers."""


def make_sources(data: Data, which: Which) -> tuple[Source, ...]:
    """Return the files of a run, in the order of the configuration."""
    sets = data.train_sets if which == "train" else data.validation_sets
    return tuple(make_source(data, dataset) for dataset in sets)


def make_source(data: Data, dataset: DataSet) -> Source:
    """Return how to read the file of a set. Keys of the set's table take precedence over those of ``[data]``,
    and both over the preset, which is the set's or that of ``[data]``."""
    preset = dataset.preset or data.preset
    keys: dict[str, Any] = dict(zip(_KEYS, PRESETS[preset], strict=True))
    for given in (data, dataset):
        values = {key: getattr(given, key) for key in Reading.model_fields if key != "preset"}
        keys |= {key: value for key, value in values.items() if value is not None}
    keys["template"] = TEMPLATES.get(keys["template"], keys["template"])
    has = preset in ("messages", "completion")
    return Source(file=dataset.file, name=dataset.title, weight=dataset.weight, responses=has, **keys)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question and its answer."""

    row: Row
    fields: dict[str, Any]
    messages: list[dict[str, Any]]
    """Messages with ``role`` and ``content``, as in the file; a text question is one user message."""
    answer: str
    """The answer as spelled in the file; never blank."""
    template: dict[str, Any]
    """Variables of the chat template: the row's ``tools``, and those in its ``chat_template_kwargs``."""

    @cached_property
    def question(self) -> bytes:
        """Digest of the messages and template variables: equal for equal questions."""
        text = json.dumps([self.messages, self.template] if self.template else self.messages, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_task(row: Row, source: Source) -> Task:
    """Return the task of a row. Raises ``InputError`` naming file, line and field."""
    tree = row.tree()
    fields = row.fields(tree)
    refuse_media(row, fields, source)
    key = source.prompt_key
    messages = read_messages(row, find_value(row, fields, key), key)
    if messages[-1]["role"] == "assistant":
        row.fail(f"{key!r} ends with a message of the assistant, which the policy has to write: remove it")
    if not source.chat_template and [message["role"] for message in messages] != ["user"]:
        roles = ", ".join(message["role"][:20] for message in messages[:8])
        row.fail(
            f"{key!r} must be a string or one user message, got messages of {roles}; "
            "with chat_template it may be a list of messages"
        )
    template = read_template_variables(row, fields, source)
    answer = _answer(row, tree, source)
    return Task(row=row, fields=fields, messages=messages, answer=answer, template=template)


def refuse_media(row: Row, fields: dict[str, Any], source: Source) -> None:
    """Raise ``InputError`` for a row with images, video or audio, which would be ignored."""
    for name in MEDIA:
        if name != source.prompt_key and fields.get(name):
            row.fail(f"{name!r} holds media: only text is supported; remove the column to train on the text")


def gradable(answer: str) -> bool:
    """Return whether a mathematics verifier could read the answer: it has a letter or digit, and not too many
    characters."""
    return len(answer) <= LONGEST_GRADABLE and any(character.isalnum() for character in answer)


def check_source(source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``InputError`` if the source's settings prevent rendering of any prompt."""
    if source.chat_template and tokenizer.chat_template is None:
        raise InputError(
            f"{source.file}: chat_template is true, but the tokenizer has no chat template: "
            "set data.chat_template = false"
        )
    if source.responses and source.answer_after:
        raise InputError(f"{source.file}: answer_after is for answers, but the file has responses: remove it")
    if source.system_prompt and not source.chat_template:
        raise InputError(
            f"{source.file}: system_prompt needs chat_template = true; otherwise put the text into template"
        )


def conversation(task: Task, source: Source) -> list[dict[str, Any]]:
    """Return the messages, with the template applied to the last user message, and the system prompt."""
    messages = [dict(message) for message in task.messages]
    if source.template != "{prompt}":
        asked = [message for message in messages if message["role"] == "user"]
        if not asked:
            task.row.fail(f"{source.prompt_key!r} has no user message to apply the template to")
        asked[-1]["content"] = source.template.replace("{prompt}", asked[-1]["content"])
    if not source.system_prompt:
        return messages
    if messages[0]["role"] == "system":
        task.row.fail(f"{source.prompt_key!r} already has a system message, but system_prompt is set")
    return [{"role": "system", "content": source.system_prompt}, *messages]


def encode(task: Task, source: Source, tokenizer: PreTrainedTokenizerBase) -> tuple[str, tuple[int, ...]]:
    """Return the prompt as text and as token ids, without added special tokens: bare, or rendered by the chat
    template up to the start of the assistant's turn."""
    messages = conversation(task, source)
    text = str(messages[0]["content"])
    if source.chat_template:
        text = str(render(task, source, tokenizer, messages, add_generation_prompt=True, tokenize=False))
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        task.row.fail(f"{source.prompt_key!r} is empty: it has no tokens ({text[:40]!r})")
    return text, ids


def render(
    task: Task,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    **options: Any,
) -> Any:
    """Return what the tokenizer's chat template, with these ``options`` of it, makes of the messages. Raises
    ``InputError`` if it rejects them, or lacks a variable of the task."""
    for name in task.template.keys() - _words(str(tokenizer.chat_template)):
        task.row.fail(f"{name!r} is no variable of the chat template: it would change nothing")
    try:
        return tokenizer.apply_chat_template([*messages], **options, **task.template)
    except Exception as error:  # the template is code from the checkpoint and may raise anything
        reason = str(error).strip().partition("\n")[0]
        task.row.fail(f"the chat template rejects {source.prompt_key!r}: {reason}", error)


@cache
def _words(template: str) -> frozenset[str]:
    """Return the names in a chat template, without text between quotation marks."""
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL))
    return frozenset(re.findall(r"\w+", re.sub(r"'(?:\\.|[^'])*'|\"(?:\\.|[^\"])*\"", "", code)))


def find_value(row: Row, tree: dict[str, Any], key: str) -> Any:
    """Return the value of a key. If there is no such key, its dots lead into objects."""
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


def read_messages(row: Row, prompt: Any, key: str) -> list[dict[str, Any]]:
    """Return the value of ``key`` as messages with ``role`` and ``content``; a string is one of the user."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
        with suppress(ValueError, RecursionError):  # as Arrow files keep messages with different keys
            told = json.loads(prompt)
            prompt = told if all("role" in message and "content" in message for message in told) else prompt
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rows = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    # OpenAI's messages that only call tools have null.
    messages = [
        one | {"content": ""} if one.get("content") is None and one.get("tool_calls") else one for one in rows
    ]
    if not (
        messages
        and len(messages) == len(given)
        and all(isinstance(message.get(key), str) for message in messages for key in ("role", "content"))
    ):
        held = json.dumps(prompt)[:80] if isinstance(prompt, list) else kind(prompt)
        row.fail(
            f"{key!r} must be a string or a list of messages, objects with the strings"
            f" 'role' and 'content'; got {held}"
        )
    if not any(message["content"] for message in messages):
        row.fail(f"{key!r} is empty: it has no text")
    return messages


def read_template_variables(row: Row, fields: dict[str, Any], source: Source) -> dict[str, Any]:
    variables, tools = (_read_json(row, name, fields.get(name)) for name in ("chat_template_kwargs", "tools"))
    if not (isinstance(tools, list | None) and all(isinstance(tool, dict) for tool in tools or ())):
        row.fail(f"'tools' must be a list of objects, got {kind(tools)}")
    if not isinstance(variables, dict | None) or _OWN_VARIABLES & (variables or {}).keys():
        row.fail(f"'chat_template_kwargs' must be an object without {', '.join(sorted(_OWN_VARIABLES))}")
    given = (variables or {}) | ({"tools": tools} if tools else {})
    if given and not source.chat_template:
        row.fail(f"{min(given)!r} is for a chat template: set chat_template = true, or remove it")
    return given


def _read_json(row: Row, name: str, value: Any) -> Any:
    """Return a value, or what its text means as JSON: Arrow files keep objects of different shapes so."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError) as error:
        row.fail(f"{name!r} is not JSON: {error}", error)


def _answer(row: Row, tree: dict[str, Any], source: Source) -> str:
    key = source.answer_key
    value = find_value(row, tree, key)
    # Numbers from JSON lines are text already, spelled as in the file.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, str) or is_number):
        row.fail(f"{key!r} must be a string or a number, got {kind(value)}")
    answer = str(value) if isinstance(value, str) else repr(value)
    if mark := source.answer_after:
        _, has_mark, answer = answer.rpartition(mark)
        if not has_mark:
            row.fail(f"{key!r} has no {mark!r} before the answer (data.answer_after)")
        answer = answer.strip()
    if not answer.strip():
        row.fail(f"{key!r} is empty: there is nothing to compare a response with")
    return answer
