"""Formats figures as text, aligned columns, Markdown and JSON. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

Table = tuple[list[str], list[tuple[str, ...]]]
"""Head and rows."""


def number(value: float | None, form: str = ".2f", absent: str = "-") -> str:
    """Format a number; return ``absent`` if it is None or not finite."""
    return absent if value is None or not math.isfinite(value) else f"{value:{form}}"


def percent(value: float | None) -> str:
    return number(value, ".1%")


def interval(low: float | None, high: float | None, form: str = ".2f") -> str:
    """Format as ``[low, high]``; empty if an end is None or not finite."""
    if low is None or high is None or not math.isfinite(low + high):
        return ""
    return f"[{low:{form}}, {high:{form}}]"


def with_interval(
    value: float | None, low: float | None, high: float | None, form: str = ".2f", absent: str = "-"
) -> str:
    """Format as ``value [low, high]``, or without the interval if there is none."""
    text = number(value, form, absent)
    return text if text == absent else f"{text} {interval(low, high, form)}".rstrip()


def by_column(cells: Mapping[str, Sequence[str]]) -> Table:
    """Convert a table given as column head → cells to its head and rows."""
    return list(cells), list(zip(*cells.values(), strict=True))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table for the console, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are right-aligned, except for the first."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def plain(value: Any) -> Any:
    """Convert to JSON types: unpack dataclasses, tensors and arrays; non-finite floats become None."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
