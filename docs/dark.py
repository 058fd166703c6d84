"""Pictures of the pages where the reader's system is dark."""

from __future__ import annotations

_RULE = "@media (prefers-color-scheme: dark) { svg { filter: invert(.88) hue-rotate(180deg) } }"


def for_dark(svg: str) -> str:
    """The svg, which has a white ground, with a rule that makes it dark and keeps its hues."""
    at = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:at]}<style>{_RULE}</style>{svg[at:]}"
