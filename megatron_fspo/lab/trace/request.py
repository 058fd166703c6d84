"""What is asked of the traced process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Request:
    """The step of one rank."""

    config: dict[str, Any]
    """Of the run, as JSON types."""
    model: str
    """A preset or a folder."""
    layers: int | None = None
    """Layers of the model in place of its own."""
    world: int
    rank: int
    fault: str | None = None
    """``module:function`` to call before the step: for tests."""
