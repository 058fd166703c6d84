"""The prompts of a run: files read, cleared of what a run must not see twice, and rendered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_fspo.config.data import Data
from megatron_fspo.data.presets import Source, Which, sources_of
from megatron_fspo.data.rows import read_rows
from megatron_fspo.data.tasks import Task, check_source, read_task, render, tokens
from megatron_fspo.errors import Attempts, InputError
from megatron_fspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class LoadedSet:
    """The prompts of one file, and what of it is not among them."""

    source: Source
    prompts: tuple[Prompt, ...]
    rows: int
    """Of the file."""
    duplicates: int
    """Rows left out since an earlier row has their prompt and answer."""
    conflicting: int
    """Rows left out since others have their prompt and another answer."""
    too_long: int
    """Rows left out since their prompt has more than ``max_prompt_tokens``."""

    def left_out(self) -> str:
        """How many rows, and why; empty if none."""
        why = {
            "with the prompt and answer of an earlier row": self.duplicates,
            "whose prompt has several answers": self.conflicting,
            "longer than data.max_prompt_tokens": self.too_long,
        }
        return ", ".join(f"{count:,} {text}" for text, count in why.items() if count)


def load_sets(
    data: Data, which: Which, tokenizer: PreTrainedTokenizerBase, *, start: int = 0
) -> tuple[LoadedSet, ...]:
    """The training or the evaluation sets of a run. Their prompts have one numbering, from ``start``.

    Raises ``InputErrors``: for each file that is wrong, its line and what is wrong with it.
    """
    attempt = Attempts()
    found: list[LoadedSet] = []
    for source in sources_of(data, which):
        load = partial(load_set, source, tokenizer, max_prompt_tokens=data.max_prompt_tokens, start=start)
        if one := attempt(load):
            start += len(one.prompts)
            found.append(one)
    attempt.end()
    return tuple(found)


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    chat_template: bool = False,
    max_prompt_tokens: int,
) -> tuple[Prompt, ...]:
    """:func:`load_set` for a file of a program's own: its prompts, ``prompts[i].index == i``."""
    source = Source(
        file=Path(path),
        name=Path(path).stem,
        prompt_key=prompt_key,
        answer_key=answer_key,
        chat_template=chat_template,
    )
    return load_set(source, tokenizer, max_prompt_tokens=max_prompt_tokens).prompts


def load_set(
    source: Source, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int, start: int = 0
) -> LoadedSet:
    """Read a file, row by row; the prompts that stay are numbered from ``start`` in its order.

    The prompt is a string, or a list of messages (objects with ``role`` and ``content``). The words of the
    template go around it; with ``chat_template`` it goes through the tokenizer's, up to where the assistant
    begins. The answer is a string or a number, and stays as it is written (``1.50``).

    No special token is added: the template writes its own, and a raw prompt is exactly what the file says.
    Qwen3 has no BOS; for a model that wants one in front of a raw prompt, write it in the file.

    Raises:
        InputError: the file, the line and what is wrong with it.
    """
    check_source(source, tokenizer)
    seen = Seen()
    left_out: Counter[str] = Counter()
    kept: list[tuple[bytes, Task, str, tuple[int, ...]]] = []
    rows = 0
    for row in read_rows(source.file, (source.prompt_key, source.answer_key)):
        rows += 1
        task = read_task(row, source)
        question = task.question
        verdict = seen.add(question, task)
        if verdict == "duplicate" and source.duplicates == "drop":
            left_out["duplicates"] += 1
            continue
        if verdict == "conflict" and source.conflicts == "error":
            task.row.fail(_conflict(source, task, seen.first(question)))
        text = render(task, source, tokenizer)
        ids = tokens(task, text, source, tokenizer)
        if len(ids) > max_prompt_tokens and source.too_long == "error":
            task.row.fail(
                f"{source.prompt_key!r} has {len(ids)} tokens, max_prompt_tokens is {max_prompt_tokens}"
            )
        if len(ids) > max_prompt_tokens:
            left_out["too_long"] += 1
            continue
        kept.append((question, task, text, ids))
    if source.conflicts == "drop":
        staying = [item for item in kept if len(seen.answers(item[0])) == 1]
        left_out["conflicting"] = len(kept) - len(staying)
        kept = staying
    if not kept:
        why = f": all {rows} rows are left out" if rows else ""
        raise InputError(f"{source.file}: holds no prompts{why}")
    prompts = [
        Prompt(
            index=index, token_ids=ids, text=text, answer=task.answer, fields=task.fields, dataset=source.name
        )
        for index, (_, task, text, ids) in enumerate(kept, start=start)
    ]
    return LoadedSet(
        source=source,
        prompts=tuple(prompts),
        rows=rows,
        duplicates=left_out["duplicates"],
        conflicting=left_out["conflicting"],
        too_long=left_out["too_long"],
    )


class Seen:
    """Which questions came already, and with which answers."""

    def __init__(self) -> None:
        self._answers: dict[bytes, dict[str, str]] = {}

    def add(self, question: bytes, task: Task) -> Literal["new", "duplicate", "conflict"]:
        """Take a task in; what it is beside those before. A conflict is another answer to a question."""
        answers = self._answers.setdefault(question, {})
        if task.answer in answers:
            return "duplicate"
        answers[task.answer] = task.row.place
        return "new" if len(answers) == 1 else "conflict"

    def answers(self, question: bytes) -> dict[str, str]:
        """To a question, each with the place of the first row that has it."""
        return self._answers[question]

    def first(self, question: bytes) -> tuple[str, str]:
        """The first answer to a question, and its place."""
        return next(iter(self._answers[question].items()))

    @property
    def conflicts(self) -> int:
        """Questions with more than one answer."""
        return sum(len(answers) > 1 for answers in self._answers.values())


def _conflict(source: Source, task: Task, first: tuple[str, str]) -> str:
    answer, place = first
    return (
        f"{source.answer_key!r} is {task.answer[:40]!r}, but {place} has {answer[:40]!r} for the same "
        'prompt; set data.conflicts to "drop" (none of them is taken) or "keep"'
    )


def notes(sets: Sequence[LoadedSet]) -> tuple[str, ...]:
    """What was left out of which file, a line each; none for a file that is there as a whole."""
    return tuple(
        f"{one.source.file}: {len(one.prompts):,} prompts of {one.rows:,} rows; left out: {left_out}"
        for one in sets
        if (left_out := one.left_out())
    )
