"""What is asked of the traced process, and what is recorded of a program on a GPU, by the line of it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_HERE = f"{Path(__file__).parent}/"
# A checkout, with an environment in it, may have the name of the package.
_PACKAGES = re.compile(
    r".*/((?:megatron_fspo|megatron/core|transformer_engine)/(?!tests/|.*site-packages/).*)"
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The step of one rank."""

    config: dict[str, Any]
    """Of the run, as JSON types."""
    model: str
    """A preset or a folder."""
    layers: int | None = None
    """Layers of the model in place of its own."""
    experts: int | None = None
    """Experts of a layer in place of its own."""
    world: int
    rank: int
    job: str | None = None
    """Name of a job of which all ranks are traced, with packs of many lengths, and compared."""
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
class Made:
    """A process group, which every rank of a job makes."""

    group: str
    ranks: tuple[int, ...]
    about: str


@dataclass(frozen=True)
class Call:
    """A collective or message, as NCCL is told of it; a message has its other rank as ``root``."""

    group: str
    name: str
    """Of the operation of ``torch.ops.c10d``."""
    dtypes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    """Elements of each tensor, outputs first."""
    reduction: str = ""
    root: int | None = None
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    """Rows of an all-to-all for and from each rank of the group."""
    blocks: bool = False
    """The stream waits for it at once."""
    batch: int | None = None
    """Messages of a batch begin and end together."""
    number: int | None = None
    """In its group; None: as counted."""
    pending: bool = False
    phase: str = ""
    site: Site = Site("?", 0, "?")
    size: int = 0
    """Bytes of the largest tensor; the whole one, if ranks hold its parts."""


@dataclass(frozen=True)
class Wait:
    """The stream waits for a call, by its place among the events, or for all that the device does."""

    call: int | None


Event = Made | Call | Wait
OBJECTS = ("object",)


def sum_sent(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return, by line, how often tensors were exchanged with other ranks, and the bytes sent on a ring."""
    rows: dict[Any, dict[str, Any]] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    for event in events:
        if isinstance(event, Made):
            ranks[event.group] = event.ranks
        elif isinstance(event, Call) and (n := len(ranks[event.group])) > 1 and event.dtypes != OBJECTS:
            key = (event.phase, event.site, event.name, ranks[event.group])
            row: dict[str, Any] = dict(zip(("phase", "site", "name", "ranks"), key, strict=True))
            row |= {"site": asdict(event.site), "count": 0, "sent": 0.0, "largest": 0}
            row = rows.setdefault(key, row)
            share = {"allreduce_": 2 * (n - 1) / n, "send": 1.0, "recv_": 0.0, "barrier": 0.0}
            row["count"] += 1
            row["sent"] += event.size * share.get(event.name, (n - 1) / n)
            row["largest"] = max(row["largest"], event.size)
    return [*rows.values()]


@dataclass
class Trace:
    """What was seen, by phase."""

    phase: str = "build"
    syncs: Counter[Sync] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    """What NCCL was told, in order."""
    flops: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    """Operations that are no views, and kernels."""
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


@cache
def shortened(file: str) -> str | None:
    """Return a file of ours, Megatron's or Transformer Engine's, from the package on; None for others."""
    found = _PACKAGES.match(file)
    return None if found is None else found[1]


def here() -> Site:
    """Return the innermost line of ours, Megatron's or Transformer Engine's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and (file := shortened(name)) is not None:
            return Site(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return Site("torch", 0, "autograd")
