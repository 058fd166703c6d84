"""Where the time of a run went, and on what machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fspo.lab.report.history import History
from megatron_fspo.record.log import PHASES

_BETWEEN = {"testing": "evaluation", "save_checkpoint": "checkpoint"}
"""Phases between steps, which the time of a step leaves out."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A kind of work."""

    name: str
    seconds: float
    """Mean over all steps, also those that had none of it."""
    share: float
    """Of the whole time of the steps and what was done between them."""
    between: bool
    """Done between steps: evaluations and checkpoints."""


def phases(history: History) -> list[Phase]:
    """The phases that took any time, in the order of a step; empty for a run that timed no step."""
    steps = len(history.series("timing_s/step").steps)
    if not steps:
        return []
    seconds = {
        words: history.series(f"timing_s/{name}").total() / steps
        for name, words in (PHASES | _BETWEEN | {"step": "step"}).items()
    }
    step = seconds.pop("step")
    between = {words: seconds.pop(words) for words in _BETWEEN.values()}
    # Packing, sums over ranks, logging.
    inside = seconds | {"the rest": max(step - sum(seconds.values()), 0.0)}
    whole = sum(inside.values()) + sum(between.values())
    return [
        Phase(name=words, seconds=mean, share=mean / whole, between=words in between)
        for words, mean in (inside | between).items()
        if mean > 0
    ]


def machines(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What each kind of machine computed and with which versions, in words; empty for a run that did not
    record it.

    Args:
        jobs: rows of ``jobs.jsonl``. A job that went on with the same as the one before is not told again.
    """
    hardware = _changes([(job["step"], _hardware(job)) for job in jobs])
    packages = _changes([(job["step"], _packages(job)) for job in jobs])
    return {"Hardware": hardware, "Versions": packages} if jobs else {}


def _hardware(job: Mapping[str, Any]) -> str:
    count, device = job["processes"], job["device"]
    processes = f"{count} process{'es' if count > 1 else ''}"
    cpu = f"{job['cpu']}, {job['cores']} cores on the first machine"
    return f"{processes} on {cpu}" if device == "CPU" else f"{processes} × {device}; {cpu}"


def _packages(job: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in job["versions"].items())


def _changes(told: Sequence[tuple[int, str]]) -> str:
    """Those that are not as the one before, from which step on."""
    kept = [one for before, one in zip([(0, ""), *told], told, strict=False) if one[1] != before[1]]
    return "; ".join(
        f"from step {step + 1}: {words}" if number else words for number, (step, words) in enumerate(kept)
    )
