"""Reads a data file before a run: counts, lengths, what is wrong, and what prompts look like."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_fspo.data.prompts import Seen
from megatron_fspo.data.rows import read_rows
from megatron_fspo.data.tasks import Source, Task, check_source, conversation, encode, gradable, read_task
from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Prompts, and examples of what is wrong."""


@dataclass(kw_only=True)
class FileCheck:
    """The contents of one file. Its prompts are the rows that are prompts, also in conflict or too long."""

    source: Source
    unit: str
    """The unit of the lengths: ``tokens``, or ``characters`` where no tokenizer was given."""
    samples: int | None = None
    """Responses to each prompt, of an evaluation set of a run."""
    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    """One for each prompt."""
    duplicates: int = 0
    """Rows whose prompt and answer came before."""
    conflicts: list[str] = field(default_factory=list)
    """Rows whose prompt came before with another answer."""
    broken: list[str] = field(default_factory=list)
    """Rows that are no prompts."""
    too_long: list[str] = field(default_factory=list)
    """Rows with prompts of more than ``max_prompt_tokens``; counted in tokens only."""
    ungradable: list[str] = field(default_factory=list)
    """Rows whose answer no verifier of mathematics can read."""
    rendered: list[str] = field(default_factory=list)
    """The first prompts with their answers."""

    @property
    def fine(self) -> bool:
        """Return whether a run would take the file, and could grade every answer."""
        refused = self.broken + self.ungradable
        refused += self.conflicts if self.source.conflicts == "error" else []
        refused += self.too_long if self.source.too_long == "error" else []
        return bool(self.lengths) and not refused

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return first and last length and the prompts of each bin; bins end before powers of two."""
        bins = Counter(length.bit_length() for length in self.lengths)
        span = range(min(bins), max(bins) + 1) if bins else ()
        return [(2 ** (bits - 1), 2**bits - 1, bins[bits]) for bits in span]


def examine(source: Source, tokenizer: PreTrainedTokenizerBase | None, max_prompt_tokens: int) -> FileCheck:
    """Read the whole file, and go on after rows that are wrong.

    Raises:
        InputError: it cannot be read at all, or holds no rows; or no prompt could be rendered.
    """
    if tokenizer is not None:
        check_source(source, tokenizer)
    checked = FileCheck(source=source, unit="characters" if tokenizer is None else "tokens")
    seen = Seen()
    for row in read_rows(source.file, (source.prompt_key, source.answer_key)):
        checked.rows += 1
        try:
            task = read_task(row, source)
            novelty = seen.add(task)
            if novelty == "conflict":
                answer, location = seen.first(task)
                checked.conflicts.append(
                    f"{row.location}: {task.answer[:40]!r}, but {answer[:40]!r} at {location}"
                )
            if novelty == "duplicate":
                checked.duplicates += 1
                if source.duplicates == "drop":
                    continue
            text, units = _shown(task, source) if tokenizer is None else encode(task, source, tokenizer)
        except InputError as error:
            checked.broken.append(str(error))
            continue
        length = len(units)
        checked.lengths.append(length)
        if not gradable(task.answer):
            checked.ungradable.append(f"{row.location}: {source.answer_key!r} is {task.answer[:40]!r}")
        if tokenizer is not None and length > max_prompt_tokens:
            checked.too_long.append(
                f"{row.location}: {length} tokens, max_prompt_tokens is {max_prompt_tokens}"
            )
        if len(checked.rendered) < SHOWN:
            checked.rendered.append(f"{row.location}, answer {task.answer[:200]!r}\n{text}")
    if not checked.rows:
        raise InputError(f"{source.file}: holds no prompts")
    return checked


def _shown(task: Task, source: Source) -> tuple[str, str]:
    """Return the prompt without a tokenizer, twice, where text and ids would be: for the chat template stand
    messages with their roles."""
    messages = conversation(task, source)
    text = str(messages[0]["content"])
    if source.chat_template:
        text = "\n".join(f"<{message['role']}> {message['content']}" for message in messages)
    return text, text
