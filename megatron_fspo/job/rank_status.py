"""Status files of ranks, ``ranks/00007.json`` in the run folder, which ``megatron-fspo status`` reads.

A thread of each rank rewrites its file every :data:`~megatron_fspo.job.lock.REFRESH_SECONDS`, also while the
main thread is in a collective. The file's age shows whether the process lives; its ``progress`` shows when
the main thread last made progress.

Write errors do not end the run. Each write is 300 bytes and three operations of the file server: 150
operations per second for 512 ranks, where a metadata server handles tens of thousands.
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
"""Folder of the status files in the run folder."""
ENDED, FAILED = "ended", "failed"
"""Phases of a rank that has left the job."""
_LISTED = 5
"""Maximum number of ranges in a message."""


class Activity:
    """What the main thread does; read by the thread that writes the status file."""

    def __init__(self) -> None:
        self.step = 0
        """The current step; 0 before the first."""
        self.phase = "between phases"
        self.progress = time.time()
        """When the main thread last made progress, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The content of a rank's status file."""

    rank: int
    size: int
    """Number of ranks of the job."""
    job: str
    """The nonce of the run folder's lock, held by this job."""
    host: str
    process: int
    local_rank: int
    step: int
    """The current step; 0 before the first."""
    phase: str
    waits: str
    """What it waits for, outside of collectives; "" while it works."""
    progress: float
    """When the main thread last made progress, in seconds since 1970 on the rank's clock."""
    written: float
    """When the file was written, on the same clock."""


def status_writer(
    folder: Path, job: str, activity: Activity, waits: Callable[[], str], *, rank: int, size: int
) -> Callable[[], None]:
    """Return a function that writes this rank's file. The first rank removes files left by a larger job.

    ``job`` is the nonce of the run folder's lock; ``waits`` returns what the main thread waits for.
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
        with suppress(OSError):  # a full disk is reported by more important writes
            path.parent.mkdir(exist_ok=True)
            partial.write_text(json.dumps(fixed | doing | times), encoding="utf-8")
            partial.rename(path)

    return write


def status_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's status file; ``folder`` is the run folder."""
    return folder / RANKS / f"{rank:05d}.json"


def read_status(path: Path) -> tuple[RankStatus, float] | None:
    """Return the content of a status file and its time stamp on the file system's clock; None if it is not
    readable or valid."""
    try:
        with path.open("rb") as file:  # opening makes a network file system ask its server
            return RankStatus(**json.loads(file.read())), os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, TypeError):
        return None


def named_ranks(numbers: Sequence[int]) -> str:
    """Format rank numbers: ``rank 3`` or ``ranks 0-3, 8``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: ``0-3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = [f"{len(texts) - _LISTED} more ranges"] if len(texts) > _LISTED else []
    return ", ".join(texts[:_LISTED] + more)
