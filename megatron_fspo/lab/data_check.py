"""What is in a data file, for a person and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from megatron_fspo.data.check import SHOWN, FileCheck

_BAR = 40
"""Characters of the longest bar of the histogram."""


def as_json(checked: FileCheck) -> dict[str, Any]:
    """Return the check as JSON types; of what is wrong the number and the first examples. ``too_long`` is
    there only if lengths are in tokens."""
    wrong = {key: getattr(checked, key) for key in ("broken", "conflicts", "too_long", "ungradable")}
    if checked.unit == "characters":
        wrong.pop("too_long")
    lengths = checked.lengths
    return {
        "file": str(checked.source.file),
        **({} if checked.samples is None else {"samples": checked.samples}),
        "fine": checked.fine,
        "rows": checked.rows,
        "prompts": len(lengths),
        "duplicates": checked.duplicates,
        **{key: {"count": len(lines), "first": lines[:SHOWN]} for key, lines in wrong.items()},
        "length": {
            "unit": checked.unit,
            "min": min(lengths, default=None),
            "median": statistics.median(lengths) if lengths else None,
            "max": max(lengths, default=None),
            "histogram": checked.histogram(),
        },
        "rendered": checked.rendered,
    }


def describe(checked: FileCheck) -> str:
    """Return the check for a person."""
    source = checked.source
    after = f" after {source.answer_after!r}" if source.answer_after else ""
    lines = [
        f"{source.file}: prompt from {source.prompt_key!r}, answer from {source.answer_key!r}{after}",
        _count("rows", checked.rows),
        _count("prompts", len(checked.lengths)),
        *([_count("samples", checked.samples, "responses to each prompt")] if checked.samples else []),
        _count("duplicates", checked.duplicates, "left out" if source.duplicates == "drop" else "kept"),
    ]
    refused = {"error": "a run refuses the file", "drop": "a run leaves them out", "keep": "kept"}
    lines += _wrong("conflicting answers", checked.conflicts, refused[source.conflicts])
    lines += _wrong("broken rows", checked.broken, refused["error"])
    if checked.unit == "tokens":
        lines += _wrong("too long", checked.too_long, refused[source.too_long])
    else:
        lines.append("  too long             not counted: no tokenizer given")
    lines += _wrong("un-gradable answers", checked.ungradable, "no verifier of mathematics reads them")
    if checked.lengths:
        lengths = checked.lengths
        bare = ", without the chat template" if checked.unit == "characters" and source.chat_template else ""
        lines.append(
            f"  length in {checked.unit}{bare}: {min(lengths)} to {max(lengths)}, "
            f"median {statistics.median(lengths):g}"
        )
        bins = checked.histogram()
        most, width = max(count for _, _, count in bins), len(f"{bins[-1][1]:,}")
        lines += [
            f"    {first:>{width},} – {last:>{width},} {count:>9,}  {'█' * -(-count * _BAR // most)}".rstrip()
            for first, last, count in bins
        ]
    for text in checked.rendered:
        head, _, prompt = text.partition("\n")
        lines += [f"  {head}", *(f"  | {line}" for line in prompt.split("\n"))]
    return "\n".join(lines)


def _count(name: str, count: int, note: str = "") -> str:
    return f"  {name:<20} {count:>9,}" + (f"   {note}" if count and note else "")


def _wrong(name: str, examples: Sequence[str], note: str) -> list[str]:
    return [_count(name, len(examples), note), *(f"    {line}" for line in examples[:SHOWN])]
