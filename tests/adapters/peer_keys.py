"""The keys that docs/coming_from.md names, by column."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/coming_from.md"


def named(heading: str, column: str) -> list[str]:
    """What stands in backticks in a column of the table under a heading, without its remarks.

    Raises ``ValueError`` where the page has no such table or column.
    """
    table = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    head, _, *rows = (
        [cell.strip() for cell in row.split("|")] for row in table.splitlines() if row[:1] == "|"
    )
    at = head.index(column)
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row[at])]
