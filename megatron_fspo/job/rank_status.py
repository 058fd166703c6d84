"""A file says to who looks from outside what a rank does: ``ranks/00007.json`` in the folder of the run.

A thread of each rank writes its file again every :data:`~megatron_fspo.job.lock.REFRESH_SECONDS`, also while
the main thread is in a collective. The age of the file tells whether the process lives; ``progress`` in it,
when the main thread last came further. ``megatron-fspo status`` reads them.

A file that cannot be written does not end the run. It costs 300 bytes, made and renamed: three operations of
the file server. 512 ranks make 150 in a second, spread over the interval, where a metadata server takes tens
of thousands.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RANKS = "ranks"
"""The folder, in that of the run."""
ENDED, FAILED = "ended", "failed"
"""Phases of a rank that has left the job."""
_LISTED = 5
"""Ranges that a message lists at most."""


class Activity:
    """The main thread's note of what it does; the thread of the status file reads it."""

    def __init__(self) -> None:
        self.step = 0
        """Under way; 0 before the first."""
        self.phase = "between phases"
        self.progress = time.time()
        """When it last came further."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The content of the file of a rank."""

    rank: int
    size: int
    """Ranks of the job."""
    job: str
    """The nonce of the lock under which it writes."""
    host: str
    process: int
    local_rank: int
    step: int
    """Under way; 0 before the first."""
    phase: str
    waits: str
    """The thing it waits for, outside of collectives; "" while it works."""
    progress: float
    """When the main thread last came further, in seconds since 1970 on the rank's clock."""
    written: float
    """When the file was written, on the same clock."""


def status_writer(
    folder: Path, job: str, activity: Activity, waits: Callable[[], str], *, rank: int, size: int
) -> Callable[[], None]:
    """Return a function that writes the file of this rank; the first rank removes what a larger job left.

    ``job`` is the nonce of the lock of the run's folder; ``waits`` says what the main thread waits for.
    """
    if rank == 0:
        for path in (folder / RANKS).glob("*"):
            if not path.stem.isdigit() or int(path.stem) >= size:
                path.unlink(missing_ok=True)
    path = status_file(folder, rank)
    fixed = {"rank": rank, "size": size, "job": job, "host": socket.gethostname(), "process": os.getpid()}
    fixed["local_rank"] = int(os.environ.get("LOCAL_RANK", "0"))

    def write() -> None:
        doing = {"step": activity.step, "phase": activity.phase, "waits": waits()}
        times = {"progress": activity.progress, "written": time.time()}
        partial = path.with_suffix(".partial")
        with suppress(OSError):  # a full disk: what has to be written says so
            path.parent.mkdir(exist_ok=True)
            partial.write_text(json.dumps(fixed | doing | times), encoding="utf-8")
            partial.rename(path)

    return write


def status_file(folder: Path, rank: int) -> Path:
    """The file of a rank, in the folder of the run."""
    return folder / RANKS / f"{rank:05d}.json"


def read_status(path: Path) -> tuple[RankStatus, float] | None:
    """The content of a rank's file, and when it was written on the file system's clock; None if there is no
    file that can be read."""
    try:
        with path.open("rb") as file:  # opened first: then a network file system asks its server
            return RankStatus(**json.loads(file.read())), os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, TypeError):
        return None


def named_ranks(numbers: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 8``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 8`` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = [f"{len(texts) - _LISTED} more ranges"] if len(texts) > _LISTED else []
    return ", ".join(texts[:_LISTED] + more)
