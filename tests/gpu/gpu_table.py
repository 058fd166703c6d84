"""The table of ``make test-gpu``: figures as they were found, beside what they are to be compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure."""

    item: str
    what: str
    value: float | int | str
    beside: float | int | str = ""
    """The value that it is compared with."""
    unit: str = ""


def number(value: float | int | str) -> str:
    """Three digits, or as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def as_markdown(rows: Sequence[Row], machine: Mapping[str, Any], passed: int, others: Sequence[str]) -> str:
    """A page: the machine, the figures, and the tests that did not pass, with the reason."""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    lines = [
        f"# {machine['count']} × {machine['name']}",
        "",
        f"`make test-gpu`; {machine['total'] / 2**30:.1f} GiB; {versions}.",
        "",
        "| item | what | found | beside | unit |",
        "|---|---|---|---|---|",
        *(
            f"| {row.item} | {row.what} | {number(row.value)} | {number(row.beside)} | {row.unit} |"
            for row in rows
        ),
    ]
    lines += ["", f"{passed} tests passed."]
    if others:
        lines += ["", "Not passed:", "", *(f"- {text}" for text in others)]
    return "\n".join(lines) + "\n"
