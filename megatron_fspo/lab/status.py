"""The state of a run, read from its folder alone, by anybody who can read that."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.job.lock import LOCK, STALE_SECONDS, Owner, now_there, read_owner, refreshed
from megatron_fspo.job.rank_status import ENDED, FAILED, RANKS, RankStatus, named_ranks, read_status
from megatron_fspo.job.resume import checkpoints
from megatron_fspo.record.rows import METRICS, describe, rows_from_end

SILENT_SECONDS = 60.0
"""Without a new file: six of them were missed."""
STUCK_SECONDS = 1800.0
"""Without progress."""


@dataclass(frozen=True, kw_only=True)
class SeenRank:
    """One rank as its file shows it."""

    rank: int
    status: RankStatus | None
    """None: there is no file."""
    silent: float = 0.0
    """Seconds since the file was written."""
    no_progress: float = 0.0
    """Seconds since its main thread came further."""

    @property
    def has_left(self) -> bool:
        """True once the rank has left the job."""
        return self.status is not None and self.status.phase in (ENDED, FAILED)

    @property
    def problem(self) -> str:
        """The complaint about this rank; "" if all is well."""
        if self.status is None:
            return "not heard of"
        if self.has_left:
            return "" if self.status.phase == ENDED else "its error is in the output of the job"
        if self.silent > SILENT_SECONDS:
            return f"not heard of for {self.silent:.0f} s"
        if self.no_progress > STUCK_SECONDS:
            return f"no progress for {self.no_progress:.0f} s"
        return ""

    @property
    def line(self) -> str:
        """The activity of the rank, in words; with a problem also that, and where it runs."""
        if self.status is None:
            return f"no sign of life yet; {self.problem}"
        status, where = self.status, ""
        waits = f", waiting for {status.waits}" if status.waits and not self.has_left else ""
        if self.problem:
            where = f"; {self.problem}"
            where += "" if self.has_left else f" ({status.host}, process {status.process})"
        return f"{status.phase}{waits}, step {status.step}{where}"


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run as its folder shows it."""

    folder: Path
    owner: Owner | None
    """Owner of the lock; None: no job is at work."""
    alive: bool | None
    """True if the owner of the lock is; None where there is none."""
    step: int
    """Steps done."""
    steps: int | None
    """Steps of the whole run; None if it has not come to write that down."""
    metrics: dict[str, Any]
    """Metrics of the last step."""
    checkpoint: str | None
    """The newest."""
    ranks: tuple[SeenRank, ...]

    @property
    def problems(self) -> list[str]:
        """A line for all that is wrong."""
        gone = [] if self.alive is not False else [f"the job is gone: its lock is that of {self.owner}"]
        return gone + [f"rank {rank.rank}: {rank.problem}" for rank in self.ranks if rank.problem]

    def as_json(self) -> dict[str, Any]:
        """Return the status in JSON types only."""
        ranks = [
            {
                **(asdict(rank.status) if rank.status else {"rank": rank.rank}),
                "silent_seconds": round(rank.silent, 1) if rank.status else None,
                "no_progress_seconds": round(rank.no_progress, 1) if rank.status else None,
                "problem": rank.problem,
            }
            for rank in self.ranks
        ]
        return {
            "folder": str(self.folder),
            "job": None if self.owner is None else {**asdict(self.owner), "alive": self.alive},
            "step": self.step,
            "steps": self.steps,
            "checkpoint": self.checkpoint,
            "metrics": self.metrics,
            "ranks": ranks,
            "problems": self.problems,
        }


def examine(folder: Path) -> RunStatus:
    """Look into the folder of a run.

    Raises:
        InputError: no run is there, or a file of it is none of ours.
    """
    try:
        locked, owner = True, read_owner(folder)
    except OSError:
        locked, owner = False, None
    if not locked and not (folder / "config.toml").exists():
        raise InputError(f"there is no run in {folder}")
    try:
        now = now_there(folder)
    except OSError:  # nothing may be written there: our own clock
        now = time.time()
    steps, config = None, folder / "config.toml"
    with suppress(FileNotFoundError):
        try:
            steps = int(tomllib.loads(config.read_text(encoding="utf-8"))["run"]["steps"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{config} is not the configuration of a run: {error}") from None
    alive = owner.lives() if owner is not None else None
    if locked and alive is None:
        alive = now - refreshed(folder / LOCK) < STALE_SECONDS
    row = next(rows_from_end(folder / METRICS), {})
    newest = checkpoints(folder)
    return RunStatus(
        folder=folder,
        owner=owner,
        alive=alive,
        step=row.get("step", 0),
        steps=steps,
        metrics=row,
        checkpoint=newest[-1].name if newest else None,
        ranks=_ranks(folder, owner, now),
    )


def render(status: RunStatus) -> str:
    """Format the status for a person; ranks that do the same share a line."""
    if status.alive is None:
        done = status.steps is not None and status.step >= status.steps
        job = "finished" if done else "no job is at work here"
    else:
        job = f"{'at work' if status.alive else 'gone'}: {status.owner or 'an unknown process'}"
    progress = f"{status.step} of {status.steps or '?'} done"
    table = [("job", job), ("steps", progress), ("checkpoint", status.checkpoint or "none yet")]
    if status.metrics:
        table.insert(2, ("last", " ".join(describe(status.step, status.steps or 0, status.metrics).split())))
    groups: dict[str, list[SeenRank]] = {}
    for rank in status.ranks:
        groups.setdefault(rank.line, []).append(rank)
    table += [
        (named_ranks([rank.rank for rank in group]), text + _since(group)) for text, group in groups.items()
    ]
    if not groups and status.alive:
        table.append(("ranks", "no sign of life yet"))
    width = max(len(name) for name, _ in table) + 2
    return "\n".join([str(status.folder), *(f"  {name:<{width}}{text}" for name, text in table)])


def _since(group: Sequence[SeenRank]) -> str:
    """Return the longest time without progress, where it is worth a word."""
    longest = max(rank.no_progress for rank in group)
    quiet = all(rank.status and not rank.problem and not rank.has_left for rank in group)
    return f", for {longest:.0f} s" if quiet and longest >= 1 else ""


def _ranks(folder: Path, owner: Owner | None, now: float) -> tuple[SeenRank, ...]:
    """Return the ranks of the job that holds the lock; without one, of the last job that was there."""
    files = [read for path in sorted((folder / RANKS).glob("*.json")) if (read := read_status(path))]
    if not files:
        return ()
    job = owner.nonce if owner else max(files, key=lambda file: file[1])[0].job
    ranks = {
        status.rank: SeenRank(
            rank=status.rank,
            status=status,
            silent=max(now - written, 0.0),
            no_progress=max(now - written, 0.0) + max(status.written - status.progress, 0.0),
        )
        for status, written in files
        if status.job == job
    }
    size = max((rank.status.size for rank in ranks.values() if rank.status), default=0)
    return tuple(ranks.get(rank, SeenRank(rank=rank, status=None)) for rank in range(size))
