"""The prompts of a run: read from files, without duplicates, rendered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from megatron_fspo.config.data import Data
from megatron_fspo.data.demonstrations import encode_row, read_row
from megatron_fspo.data.parquet import unread_columns
from megatron_fspo.data.rows import read_rows
from megatron_fspo.data.tasks import Source, Task, Which, check_source, make_sources
from megatron_fspo.errors import Attempts, InputError
from megatron_fspo.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WHY = {
    "duplicate": "with the prompt and answer of an earlier row",
    "conflicting": "whose prompt has several answers",
    "too long": "longer than data.max_prompt_tokens",
    "long response": "with responses longer than rollout.max_response_tokens",
}
"""Why rows of a file are not prompts of a run."""


@dataclass(frozen=True, kw_only=True)
class LoadedSet:
    """The prompts of one file."""

    source: Source
    prompts: tuple[Prompt, ...]
    rows: int
    """Rows in the file."""
    dropped: Counter[str]
    """Rows that are not among the prompts, by key of ``_WHY``."""
    columns: Mapping[str, str]
    """Type of each column that is no JSON type, and so in no prompt's fields."""

    def left_out(self) -> str:
        """Return how many rows were left out, and why, and which columns; empty if none."""
        rows = [f"{self.dropped[key]:,} {why}" for key, why in _WHY.items() if self.dropped[key]]
        return ", ".join([*rows, *(f"the column {name} ({kind})" for name, kind in self.columns.items())])


def load_sets(
    data: Data, which: Which, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> tuple[LoadedSet, ...]:
    """Return the training or evaluation sets of a run. Their prompts share one numbering, from 0. ``options``
    are those of :func:`load_set` for responses. Raises ``InputErrors`` with one error per invalid file, which
    names the line."""
    attempt, start = Attempts(), 0
    sets: list[LoadedSet] = []
    for source in make_sources(data, which):
        longest = data.max_prompt_tokens
        load = partial(load_set, source, tokenizer, max_prompt_tokens=longest, start=start, **options)
        if one := attempt(load):
            start += len(one.prompts)
            sets.append(one)
    attempt.end()
    return tuple(sets)


def load_set(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    start: int = 0,
    stops: Sequence[int] = (),
    max_response_tokens: int = 0,
) -> LoadedSet:
    """Read a file, and number the prompts that are kept from ``start`` on, in the file's order.

    The prompt is a string, or a list of messages (objects with ``role`` and ``content``). It is inserted in
    ``template``; with ``chat_template`` it then goes through the tokenizer's chat template, up to the start
    of the assistant's turn. The answer is a string or a number, and keeps its spelling (``1.50``).

    No special tokens are added: a chat template writes its own, and a raw prompt is exactly the file's text.
    Qwen3 has no BOS; if a model needs one before a raw prompt, put it in the file.

    Responses that the file has end with one of ``stops``, and have at most ``max_response_tokens``.

    Raises:
        InputError: names the file, the line and the problem.
    """
    check_source(source, tokenizer)
    seen = Seen()
    dropped: Counter[str] = Counter()
    kept: list[tuple[Task, str, tuple[int, ...], Completion | None]] = []
    rows = 0
    for row in read_rows(source.file, (source.prompt_key, *filter(None, [source.answer_key]))):
        rows += 1
        task = read_row(row, source)
        novelty = seen.add(task)
        if novelty == "duplicate" and source.duplicates == "drop":
            dropped["duplicate"] += 1
            continue
        if novelty == "conflict" and source.conflicts == "error":
            answer, location = seen.first(task)
            task.row.fail(
                f"{source.answer_key!r} is {task.answer[:40]!r}, but {location} has {answer[:40]!r} for the "
                'same prompt; set data.conflicts to "drop" (removes all of them) or "keep"'
            )
        text, ids, response = encode_row(task, source, tokenizer, stops)
        what, size, key, most = repr(source.prompt_key), len(ids), "max_prompt_tokens", max_prompt_tokens
        if size <= most and response is not None:
            what, size = "the response", len(response.token_ids)
            key, most = "rollout.max_response_tokens", max_response_tokens
        if size > most:
            if source.too_long == "error":
                task.row.fail(f"{what} has {size} tokens, {key} is {most}")
            dropped["too long" if what != "the response" else "long response"] += 1
            continue
        kept.append((task, text, ids, response))
    if source.conflicts == "drop":
        staying = [item for item in kept if seen.has_one_answer(item[0])]
        dropped["conflicting"] = len(kept) - len(staying)
        kept = staying
    if not kept:
        why = f": all {rows} rows are left out" if rows else ""
        raise InputError(f"{source.file}: holds no prompts{why}")
    prompts = [
        Prompt(
            index=index,
            token_ids=ids,
            text=text,
            answer=task.answer,
            fields={} if response else task.fields,
            dataset=source.name,
            demonstration=response,
        )
        for index, (task, text, ids, response) in enumerate(kept, start=start)
    ]
    return LoadedSet(
        source=source, prompts=tuple(prompts), rows=rows, dropped=dropped, columns=unread_columns(source.file)
    )


class Seen:
    """Remembers questions and their answers, to detect duplicates and conflicts."""

    def __init__(self) -> None:
        self._answers: dict[bytes, dict[str, str]] = {}

    def add(self, task: Task) -> Literal["new", "duplicate", "conflict"]:
        """Add a task, and return how it relates to earlier ones; a conflict has another answer."""
        answers = self._answers.setdefault(task.question, {})
        if task.answer in answers:
            return "duplicate"
        answers[task.answer] = task.row.location
        return "new" if len(answers) == 1 else "conflict"

    def has_one_answer(self, task: Task) -> bool:
        return len(self._answers[task.question]) == 1

    def first(self, task: Task) -> tuple[str, str]:
        """Return the first answer to the task's question, and the location of its row."""
        return next(iter(self._answers[task.question].items()))


def notes(sets: Sequence[LoadedSet]) -> tuple[str, ...]:
    """Return one line per file of which rows were left out, with numbers and reasons."""
    return tuple(
        f"{entry.source.file}: {len(entry.prompts):,} prompts of {entry.rows:,} rows; left out: {left_out}"
        for entry in sets
        if (left_out := entry.left_out())
    )
