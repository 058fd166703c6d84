"""What a run does at the moment, read from its folder alone, by anybody who can read that."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.job.folder import checkpoints_in
from megatron_fspo.job.heart import ENDED, FAILED, RANKS, Sign, named_ranks, read_sign, sign_file
from megatron_fspo.job.lock import LOCK, STALE_SECONDS, Owner, now_there, read_owner, refreshed
from megatron_fspo.record.log import METRICS, describe, rows_from_end

SILENT_SECONDS = 60.0
"""Without a new file: six of them were missed."""
STUCK_SECONDS = 1800.0
"""Without progress."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank as its file shows it."""

    rank: int
    sign: Sign | None
    """None: there is no file."""
    silent: float
    """Seconds since the file was written."""
    no_progress: float
    """Seconds since its main thread came further."""

    @property
    def has_left(self) -> bool:
        return self.sign is not None and self.sign.phase in (ENDED, FAILED)

    @property
    def problem(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.sign is None:
            return "not heard of"
        if self.has_left:
            return "" if self.sign.phase == ENDED else "its error is in the output of the job"
        if self.silent > SILENT_SECONDS:
            return f"not heard of for {self.silent:.0f} s"
        if self.no_progress > STUCK_SECONDS:
            return f"no progress for {self.no_progress:.0f} s"
        return ""

    @property
    def doing(self) -> str:
        """In words."""
        if self.sign is None:
            return "no sign of life yet"
        waits = f", waiting for {self.sign.waits}" if self.sign.waits and not self.has_left else ""
        return f"{self.sign.phase}{waits}, step {self.sign.step}"


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run as its folder shows it."""

    folder: Path
    owner: Owner | None
    """Of the lock; None: no job is at work."""
    alive: bool | None
    """Whether the owner is; None where there is none."""
    step: int
    """Steps done."""
    steps: int | None
    """Of the whole run; None if it has not come to write that down."""
    metrics: dict[str, Any]
    """Of the last step."""
    checkpoint: str | None
    """The newest."""
    ranks: tuple[RankStatus, ...]

    @property
    def problems(self) -> list[str]:
        """A line for all that is wrong."""
        found = [] if self.alive is not False else [f"the job is gone: its lock is that of {self.owner}"]
        return found + [f"rank {one.rank}: {one.problem}" for one in self.ranks if one.problem]

    def as_json(self) -> dict[str, Any]:
        """JSON types only."""
        ranks = [
            {
                **(asdict(one.sign) if one.sign else {"rank": one.rank}),
                "silent_seconds": round(one.silent, 1) if one.sign else None,
                "no_progress_seconds": round(one.no_progress, 1) if one.sign else None,
                "problem": one.problem,
            }
            for one in self.ranks
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


def examine(folder: Path) -> Status:
    """Look into the folder of a run.

    Raises:
        InputError: no run is there, or a file of it is none of ours.
    """
    there, owner = _owner(folder)
    if not there and not (folder / "config.toml").exists():
        raise InputError(f"there is no run in {folder}")
    now = _now(folder)
    row = next(rows_from_end(folder / METRICS), {})
    newest = checkpoints_in(folder)
    return Status(
        folder=folder,
        owner=owner,
        alive=_lives(folder, owner, now) if there else None,
        step=row.get("step", 0),
        steps=_steps(folder),
        metrics=row,
        checkpoint=newest[-1].name if newest else None,
        ranks=_ranks(folder, owner, now),
    )


def render(status: Status) -> str:
    """For a person; ranks that do the same share a line."""
    if status.alive is None:
        done = status.steps is not None and status.step >= status.steps
        job = "finished" if done else "no job is at work here"
    else:
        job = f"{'at work' if status.alive else 'gone'}: {status.owner or 'an unknown process'}"
    progress = f"{status.step} of {status.steps or '?'} done"
    table = [("job", job), ("steps", progress), ("checkpoint", status.checkpoint or "none yet")]
    if status.metrics:
        table.insert(2, ("last", " ".join(describe(status.step, status.steps or 0, status.metrics).split())))
    table += _rank_lines(status.ranks) or ([("ranks", "no sign of life yet")] if status.alive else [])
    width = max(len(name) for name, _ in table) + 2
    return "\n".join([str(status.folder), *(f"  {name:<{width}}{text}" for name, text in table)])


def _rank_lines(ranks: Sequence[RankStatus]) -> list[tuple[str, str]]:
    """Which ranks, and what they do: those with a problem are told one by one, and where they run."""
    groups: dict[str, list[RankStatus]] = {}
    for one in ranks:
        text = one.doing
        if one.problem:
            silent = one.sign is not None and not one.has_left
            where = f" ({one.sign.host}, process {one.sign.process})" if silent and one.sign else ""
            text += f"; {one.problem}{where}"
        groups.setdefault(text, []).append(one)
    return [
        (named_ranks([one.rank for one in group]), text + _since(group)) for text, group in groups.items()
    ]


def _since(group: Sequence[RankStatus]) -> str:
    """The longest time without progress, where it is worth a word."""
    longest = max(one.no_progress for one in group)
    quiet = all(one.sign and not one.problem and not one.has_left for one in group)
    return f", for {longest:.0f} s" if quiet and longest >= 1 else ""


def _ranks(folder: Path, owner: Owner | None, now: float) -> tuple[RankStatus, ...]:
    """Of the job that holds the lock; without one, of the last job that was there."""
    found = [sign for path in sorted((folder / RANKS).glob("*.json")) if (sign := read_sign(path))]
    if not found:
        return ()
    job = owner.nonce if owner else max(found, key=lambda one: one[1])[0].job
    size = max((sign.size for sign, _ in found if sign.job == job), default=0)
    return tuple(_rank(folder, rank, job, now) for rank in range(size))


def _rank(folder: Path, rank: int, job: str, now: float) -> RankStatus:
    found = read_sign(sign_file(folder, rank))
    if found is None or found[0].job != job:
        return RankStatus(rank=rank, sign=None, silent=0.0, no_progress=0.0)
    sign, written = found
    silent = max(now - written, 0.0)
    return RankStatus(
        rank=rank, sign=sign, silent=silent, no_progress=silent + max(sign.written - sign.progress, 0.0)
    )


def _owner(folder: Path) -> tuple[bool, Owner | None]:
    """Whether there is a lock, and whose it is as far as it can be read."""
    try:
        return True, read_owner(folder)
    except OSError:
        return False, None


def _lives(folder: Path, owner: Owner | None, now: float) -> bool:
    lives = owner.lives() if owner is not None else None
    return lives if lives is not None else now - refreshed(folder / LOCK) < STALE_SECONDS


def _now(folder: Path) -> float:
    """On the file system's clock; on ours where nothing may be written."""
    try:
        return now_there(folder)
    except OSError:
        return time.time()


def _steps(folder: Path) -> int | None:
    try:
        tree = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        return int(tree["run"]["steps"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'config.toml'} is not the configuration of a run: {error}") from None
