"""Figures as text and as JSON: numbers with intervals, aligned columns, Markdown. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def number(value: float | None, form: str = ".2f", absent: str = "-") -> str:
    """The figure in this format; ``absent`` where there is none or it is not finite."""
    return absent if value is None or not math.isfinite(value) else f"{value:{form}}"


def percent(value: float | None) -> str:
    """A share with one decimal."""
    return number(value, ".1%")


def interval(low: float | None, high: float | None, form: str = ".2f") -> str:
    """``[low, high]``; empty where an end is missing or not finite."""
    if low is None or high is None or not math.isfinite(low + high):
        return ""
    return f"[{low:{form}}, {high:{form}}]"


def with_interval(
    value: float | None, low: float | None, high: float | None, form: str = ".2f", absent: str = "-"
) -> str:
    """``value [low, high]``, as far as there are such."""
    text = number(value, form, absent)
    return text if text == absent else f"{text} {interval(low, high, form)}".rstrip()


def by_column(cells: Mapping[str, Sequence[str]]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Head and rows of a table that is given as head → cells of the column."""
    return list(cells), list(zip(*cells.values(), strict=True))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table for the console, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def plain(value: Any) -> Any:
    """The value as JSON types: dataclasses and tensors unpacked, null where a float is not finite."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
