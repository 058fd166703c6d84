"""A conversation of a data file as a prompt and a response, for supervised training.

The loss counts what the assistant wrote, up to and including its stop token; the rest is context. The prompt
has the tokens that a rollout would have: it ends where the assistant's first turn begins.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_fspo.data.rows import Row
from megatron_fspo.data.tasks import (
    Source,
    Task,
    conversation,
    encode,
    find_value,
    read_messages,
    read_task,
    read_template_variables,
    refuse_media,
    render,
)
from megatron_fspo.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_row(row: Row, source: Source) -> Task:
    """Return a row as a task, or as a demonstration if the source has responses."""
    return _read_demonstration(row, source) if source.responses else read_task(row, source)


def encode_row(
    task: Task, source: Source, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
) -> tuple[str, tuple[int, ...], Completion | None]:
    """Return the prompt as text and as token ids, and the response if the source has responses.

    ``stops`` are the ids that end a turn. Without a chat template, messages are joined, and the first stop
    token is appended to a response that lacks one. Raises ``InputError`` if it is ambiguous which tokens the
    assistant wrote."""
    if not source.responses:
        return (*encode(task, source, tokenizer), None)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    messages = conversation(task, source)
    # Runs of tokens that are context (0) and that the assistant wrote (1), in turns.
    runs: list[tuple[list[int], int]] = []
    if not source.chat_template:
        for written, group in groupby(messages, key=lambda message: message["role"] == "assistant"):
            runs.append((ids_of("".join(message["content"] for message in group)), int(written)))
        if not runs[-1][0]:
            task.row.fail(f"{source.answer_key or source.prompt_key!r}: the response has no tokens")
        if runs[-1][0][-1] not in stops:
            runs[-1][0].append(stops[0])
    elif re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        made = render(task, source, tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(made["input_ids"], made["assistant_masks"], strict=True)
        for written, run in groupby(pairs, key=lambda pair: int(pair[1])):
            runs.append(([token for token, _ in run], written))
    else:
        text, end = str(render(task, source, tokenizer, messages, tokenize=False)), 0
        for start, stop in _ranges(task, source, tokenizer, messages, text, stops):
            # Piece by piece, as in a rollout: no token crosses the border of a turn.
            runs += [(ids_of(text[end:start]), 0), (ids_of(text[start:stop]), 1)]
            end = stop
    if runs and not runs[-1][1]:
        runs.pop()  # nothing after the last turn is learned
    if runs and not {*runs[-1][0]} & {*stops}:
        task.row.fail("no stop token ends the response ({% generation %}?): nobody would learn to stop")
    if len(runs) < 2 or runs[0][1] or not runs[0][0]:
        task.row.fail("the rendered conversation has no prompt before a turn of the assistant")
    (prompt_ids, _), *others = runs
    token_ids = array("i", [token for ids, _ in others for token in ids])
    return (
        str(tokenizer.decode(prompt_ids)),
        tuple(prompt_ids),
        Completion(
            token_ids=token_ids,
            log_probs=array("f", bytes(4 * len(token_ids))),
            loss_mask=array("b", [written for ids, written in others for _ in ids]),
            finish_reason="stop",
            weight_version=0,
        ),
    )


def _read_demonstration(row: Row, source: Source) -> Task:
    """Return a row as a task whose messages end with one of the assistant, without an answer. Raises
    ``InputError`` naming file, line and field.

    ``prompt_key`` has the whole conversation, or if ``answer_key`` is set, its beginning; that key then has
    the rest: a string, or messages."""
    fields = row.fields(row.tree())
    refuse_media(row, fields, source)
    messages = read_messages(row, find_value(row, fields, source.prompt_key), source.prompt_key)
    if source.answer_key:
        given = find_value(row, fields, source.answer_key)
        response = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
        messages = [*messages, *read_messages(row, response, source.answer_key)]
    if not source.chat_template and any(m["role"] == "system" or m.get("tool_calls") for m in messages):
        row.fail("a message of the system, and calls of tools, need chat_template = true")
    if messages[-1]["role"] != "assistant":
        row.fail(f"the conversation ends with a message of {messages[-1]['role']}, not of the assistant")
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not (message["content"].strip() or message.get("tool_calls")):
            row.fail(f"message {number}, of the assistant, is empty: there is nothing to learn from it")
    template = read_template_variables(row, fields, source)
    return Task(row=row, fields=fields, messages=messages, answer="", template=template)


def _ranges(
    task: Task,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    text: str,
    stops: Sequence[int],
) -> list[tuple[int, int]]:
    """Return the ranges of ``text``, the rendered conversation, that the assistant wrote: each from the end
    of the prompt of its turn to the first stop token after it."""
    marks = [str(tokenizer.decode([token])) for token in stops]
    ranges: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        options = {"add_generation_prompt": True, "tokenize": False}
        prompt = str(render(task, source, tokenizer, messages[:number], **options))
        if not text.startswith(prompt) or (ranges and len(prompt) < ranges[-1][1]):
            task.row.fail(
                f"the chat template changes or drops what is before message {number + 1}, of the assistant, "
                "once the conversation goes on: split it, or use a template with {% generation %}"
            )
        ends = [end + len(mark) for mark in marks if (end := text.find(mark, len(prompt))) >= 0]
        if not ends or message["content"].strip() not in text[len(prompt) : min(ends)]:
            task.row.fail(
                f"message {number + 1}, of the assistant, is not between its prompt and a stop token "
                f"({', '.join(map(repr, marks))}) in the rendered conversation; does the template drop it?"
            )
        ranges.append((len(prompt), min(ends)))
    return ranges
