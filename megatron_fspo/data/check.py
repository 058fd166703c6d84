"""Check a data file before a run: counts, lengths, errors, and rendered prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_fspo.data.demonstrations import encode_row, read_row
from megatron_fspo.data.prompts import Seen
from megatron_fspo.data.rows import read_rows
from megatron_fspo.data.tasks import Source, check_source, conversation, gradable
from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Number of prompts, and of examples of each problem, to show."""


@dataclass(kw_only=True)
class FileCheck:
    """The contents of one file. Its prompts include rows that are in conflict or too long."""

    source: Source
    unit: str
    """Unit of the lengths: ``tokens``, or ``characters`` without a tokenizer."""
    samples: int | None = None
    """Responses per prompt, if the file is an evaluation set of a run."""
    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    """Length of each prompt."""
    duplicates: int = 0
    """Rows with the prompt and answer of an earlier row."""
    conflicts: list[str] = field(default_factory=list)
    """Rows with the prompt of an earlier row, but another answer."""
    broken: list[str] = field(default_factory=list)
    """Rows that are not prompts."""
    too_long: list[str] = field(default_factory=list)
    """Rows whose prompt exceeds ``max_prompt_tokens``; only counted in tokens."""
    ungradable: list[str] = field(default_factory=list)
    """Rows whose answer no mathematics verifier can read."""
    rendered: list[str] = field(default_factory=list)
    """The first prompts with their answers."""

    @property
    def fine(self) -> bool:
        """Whether a run would accept the file and could grade every answer."""
        refused = self.broken + self.ungradable
        refused += self.conflicts if self.source.conflicts == "error" else []
        refused += self.too_long if self.source.too_long == "error" else []
        return bool(self.lengths) and not refused

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (smallest length, largest length, prompts) of each bin; bins end before powers of two."""
        bins = Counter(length.bit_length() for length in self.lengths)
        span = range(min(bins), max(bins) + 1) if bins else ()
        return [(2 ** (bits - 1), 2**bits - 1, bins[bits]) for bits in span]


def examine(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    max_prompt_tokens: int,
    stops: Sequence[int] = (),
    max_response_tokens: float = math.inf,
) -> FileCheck:
    """Read the whole file, continuing after invalid rows. Raises ``InputError`` if the file cannot be read,
    holds no rows, or none of its prompts can be rendered. ``stops`` are the ids that end a response."""
    if tokenizer is not None:
        check_source(source, tokenizer)
    checked = FileCheck(source=source, unit="characters" if tokenizer is None else "tokens")
    seen = Seen()
    for row in read_rows(source.file, (source.prompt_key, *filter(None, [source.answer_key]))):
        checked.rows += 1
        response = None
        try:
            task = read_row(row, source)
            novelty = seen.add(task)
            if novelty == "conflict":
                first, at = seen.first(task)
                checked.conflicts.append(f"{row.location}: {task.answer[:40]!r}, but {first[:40]!r} at {at}")
            if novelty == "duplicate":
                checked.duplicates += 1
                if source.duplicates == "drop":
                    continue
            if tokenizer is None:
                messages = conversation(task, source)
                text = str(messages[0]["content"])
                if source.chat_template:  # roles replace it
                    text = "\n".join(f"<{message['role']}> {message['content']}" for message in messages)
                length = len(text)
            else:
                text, ids, response = encode_row(task, source, tokenizer, stops)
                length = len(ids)
        except InputError as error:
            checked.broken.append(str(error))
            continue
        checked.lengths.append(length)
        if not (source.responses or gradable(task.answer)):
            checked.ungradable.append(f"{row.location}: {source.answer_key!r} is {task.answer[:40]!r}")
        if tokenizer is not None and length > max_prompt_tokens:
            checked.too_long.append(
                f"{row.location}: {length} tokens, max_prompt_tokens is {max_prompt_tokens}"
            )
        shown = f"answer {task.answer[:200]!r}"
        if tokenizer is not None and response is not None:
            shown = f"response {str(tokenizer.decode(response.token_ids))[:200]!r}"
            if (size := len(response.token_ids)) > max_response_tokens:
                checked.too_long.append(
                    f"{row.location}: the response has {size} tokens, rollout.max_response_tokens is "
                    f"{max_response_tokens}"
                )
        if len(checked.rendered) < SHOWN:
            checked.rendered.append(f"{row.location}, {shown}\n{text}")
    if not checked.rows:
        raise InputError(f"{source.file}: holds no prompts")
    return checked
