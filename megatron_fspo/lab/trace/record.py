"""What is asked of the traced process, and what is recorded of a program on a GPU, by the line of it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PACKAGE = str(_HERE.parents[2]) + "/"
_OTHERS = ("/megatron/core/", "/transformer_engine/")


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


@dataclass(frozen=True, order=True)
class Site:
    """A line of the program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True)
class Sync:
    """The host waits for the device."""

    phase: str
    site: Site
    kind: str
    """The operation, or ``pageable copy``: from host memory that is not pinned, or not asynchronous."""


@dataclass(frozen=True)
class Collective:
    """Ranks that exchange tensors."""

    phase: str
    site: Site
    name: str
    """Of the operation of ``torch.ops.c10d``."""
    ranks: tuple[int, ...]

    def sent(self, size: int) -> float:
        """Return the bytes that a rank sends on a ring, of tensors of ``size`` bytes, the whole ones."""
        n = len(self.ranks)
        share = {"allreduce_": 2 * (n - 1) / n, "send": 1.0, "recv_": 0.0, "barrier": 0.0}
        return size * share.get(self.name, (n - 1) / n)


@dataclass
class Trace:
    """What was seen, by phase."""

    phase: str = "build"
    syncs: Counter[Sync] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    sent: Counter[Collective] = field(default_factory=Counter)
    """Bytes."""
    largest: dict[Collective, int] = field(default_factory=dict)
    """Bytes of the largest tensor."""
    flops: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    """Operations that are no views, and kernels."""
    dispatched: Counter[str] = field(default_factory=Counter)
    """All operations, views and what kernels are written in included."""
    mixed: list[str] = field(default_factory=list)
    """Operations on the device that were given a host tensor, with their lines."""
    allocations: dict[tuple[str, Site], int] = field(default_factory=dict)
    """Phase and line → bytes of the largest storage that it made."""
    wide: Counter[tuple[str, Site]] = field(default_factory=Counter)
    """Large float64 tensors on the device."""
    early: list[str] = field(default_factory=list)
    """Host tensors that were read before an asynchronous copy into them was waited for."""
    live: int = 0
    """Bytes held now."""
    peaks: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    at_peak: dict[tuple[str, Site], int] = field(default_factory=dict)
    """Phase and line that made it → bytes held at the peak."""


def here() -> Site:
    """Return the innermost line of ours, Megatron's or Transformer Engine's."""
    frame = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_code.co_filename, None
        if name.startswith(f"{_PACKAGE}megatron_fspo/") and not name.startswith(f"{_HERE}/"):
            file = name.removeprefix(_PACKAGE)
        elif mark := next((mark for mark in _OTHERS if mark in name), None):
            file = name[name.rindex(mark) + 1 :]
        if file is not None:
            return Site(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return Site("torch", 0, "autograd")
