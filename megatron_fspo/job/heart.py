"""What each rank does, for who looks from outside: ``ranks/00007.json`` in the folder of the run.

A thread of each rank writes its file again every :data:`REFRESH_SECONDS`, also while the main thread is in a
collective. The age of the file tells whether the process lives; ``progress`` in it, when the main thread last
came further. ``megatron-fspo status`` reads them.

It is not the thread of :mod:`~megatron_fspo.job.pulse`: a file server may stand still for minutes, and
the ranks would take one that waits for it for dead. Nor does a file that cannot be written end the run.

What it costs: a file of 300 bytes is made and renamed, three operations of the file server. 512 ranks make
150 in a second, spread over the interval, where a metadata server takes tens of thousands.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

RANKS = "ranks"
"""The folder, in that of the run."""
REFRESH_SECONDS = 10.0
ENDED, FAILED = "ended", "failed"
"""Phases of a rank that has left the job."""
_PHASES = {
    "gen": "sampling",
    "old_log_prob": "old pass",
    "ref": "reference pass",
    "update_actor": "update",
    "update_weights": "sync",
    "save_checkpoint": "saving",
}
"""The names of phases in the log → words for people; others are their own."""
_LISTED = 5
"""Ranges that a message lists at most."""


class Activity:
    """What the main thread of this rank does; it writes, the heart's thread reads."""

    def __init__(self) -> None:
        self.step = 0
        """Under way; 0 before the first."""
        self.phase = "between phases"
        self.progress = time.time()
        """When it last came further."""

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Around a phase, by its name in the log."""
        before, self.phase = self.phase, _PHASES.get(name, name)
        self.progressed()
        try:
            yield
        finally:
            self.phase = before
            self.progressed()

    def progressed(self) -> None:
        """The main thread came further."""
        self.progress = time.time()


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What is in the file of a rank."""

    rank: int
    size: int
    """Of the job."""
    job: str
    """The nonce of the lock under which it writes."""
    host: str
    process: int
    local_rank: int
    step: int
    """Under way; 0 before the first."""
    phase: str
    waits: str
    """What for, outside of collectives; "" while it works."""
    progress: float
    """When the main thread last came further, in seconds since 1970 on the rank's clock."""
    written: float
    """When the file was, on the same clock."""


class Heart:
    """Writes the file of this rank until it is closed.

    Args:
        folder: of the run.
        job: the nonce of its lock.
        activity: what to write about.
        waits: what the main thread waits for.
    """

    def __init__(
        self, folder: Path, job: str, activity: Activity, waits: Callable[[], str], *, rank: int, size: int
    ) -> None:
        self._path = sign_file(folder, rank)
        self._activity, self._waits = activity, waits
        self._fixed = {
            "rank": rank,
            "size": size,
            "job": job,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        }
        self._closed = threading.Event()
        # A daemon: a file server that does not answer holds nobody up at the end.
        self._thread = threading.Thread(target=self._live, name="heart", daemon=True)
        self._thread.start()

    def close(self, phase: str) -> None:
        """Leave :data:`ENDED` or :data:`FAILED` as the last word."""
        self._closed.set()
        self._thread.join(REFRESH_SECONDS)
        if not self._thread.is_alive():
            self._activity.phase = phase
            self._write()

    def _live(self) -> None:
        # Ranks that started together do not come to the file server together.
        pause = REFRESH_SECONDS * (1 - self._fixed["rank"] % 16 / 32)  # type: ignore[operator]
        self._write()
        while not self._closed.wait(pause):
            self._write()
            pause = REFRESH_SECONDS

    def _write(self) -> None:
        doing = self._activity
        sign = Sign(
            **self._fixed,  # type: ignore[arg-type]
            step=doing.step,
            phase=doing.phase,
            waits=self._waits(),
            progress=doing.progress,
            written=time.time(),
        )
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):  # a full disk: what has to be written says so
            self._path.parent.mkdir(exist_ok=True)
            partial.write_text(json.dumps(asdict(sign)), encoding="utf-8")
            partial.rename(self._path)


@contextmanager
def beating(
    folder: Path, job: str, activity: Activity, waits: Callable[[], str], *, rank: int, size: int
) -> Iterator[None]:
    """A heart while the block lasts; arguments as :class:`Heart` has them."""
    if rank == 0:
        _forget_ranks_beyond(folder, size)
    heart = Heart(folder, job, activity, waits, rank=rank, size=size)
    last = FAILED
    try:
        yield
        last = ENDED
    finally:
        heart.close(last)


def sign_file(folder: Path, rank: int) -> Path:
    """Of a rank, in the folder of the run."""
    return folder / RANKS / f"{rank:05d}.json"


def read_sign(path: Path) -> tuple[Sign, float] | None:
    """What is in the file of a rank, and when it was written on the file system's clock; None if there is
    none that can be read."""
    try:
        with path.open("rb") as file:  # opened first: then a network file system asks its server
            return Sign(**json.loads(file.read())), os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, TypeError):
        return None


def named_ranks(numbers: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 8``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 8`` of ascending numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    more = [f"{len(texts) - _LISTED} more ranges"] if len(texts) > _LISTED else []
    return ", ".join(texts[:_LISTED] + more)


def _forget_ranks_beyond(folder: Path, size: int) -> None:
    """Remove what a larger job left."""
    for path in (folder / RANKS).glob("*"):
        if not path.stem.isdigit() or int(path.stem) >= size:
            path.unlink(missing_ok=True)
