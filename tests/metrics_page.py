"""The names that docs/metrics.md has, and whether a row of metrics.jsonl has others."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launch import REPO

PAGE = REPO / "docs/metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \|(.*)\|$", flags=re.MULTILINE)
"""A line of a table: name, then unit, formula and what a healthy run shows."""


def names_of_page() -> list[str]:
    """Names as the page has them; ``<…>`` in a name stands for a word."""
    return [name for name, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def patterns() -> dict[str, re.Pattern[str]]:
    """Name in the page → what it stands for."""
    return {
        name: re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", name)))) for name in names_of_page()
    }


def unknown(names: Iterable[str]) -> list[str]:
    """The names that the page does not have; ``step`` is no metric."""
    known = list(patterns().values())
    return [
        name for name in names if name != "step" and not any(pattern.fullmatch(name) for pattern in known)
    ]
