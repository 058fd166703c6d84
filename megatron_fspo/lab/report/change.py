"""Held-out accuracy from the first to the last evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fspo.evaluation.intervals import interval_of_means
from megatron_fspo.lab.report.history import History
from megatron_fspo.record.log import SAMPLES, read_rows, rows_from_end


@dataclass(frozen=True, kw_only=True)
class Change:
    """Means over the prompts of the first set."""

    before: float
    after: float
    interval: tuple[float, float] | None
    """95% of ``after - before``, paired prompt by prompt; None unless every response was kept
    (``log.responses``)."""


def first_and_last_samples(folder: Path, history: History) -> list[dict[str, Any]]:
    """Rows of ``samples.jsonl`` of the first and the last evaluation; those between stay on the disk."""
    rows = read_rows(folder / SAMPLES)
    if (row := next(rows, None)) is None:
        return []
    first = [row, *takewhile(lambda one: one["step"] == row["step"], rows)]
    newest = next(rows_from_end(folder / SAMPLES))["step"]
    # The last evaluation may have responses and no metrics yet: its job was killed, or is at work.
    evaluated = history.series(history.evaluation() or "").steps
    since = max(row["step"] + 1, min([newest, *evaluated[-1:]]))
    last = [*takewhile(lambda one: one["step"] >= since, rows_from_end(folder / SAMPLES))]
    return first + last[::-1]


def accuracy_change(history: History, samples: Sequence[Mapping[str, Any]]) -> Change | None:
    """Of a run; None with fewer than two evaluations.

    Args:
        samples: what :func:`first_and_last_samples` found.
    """
    name = history.evaluation()
    if name is None or len(scores := history.series(name)) < 2:
        return None
    before, after = float(scores.values[0]), float(scores.values[-1])
    first, last = (_by_prompt(samples, step) for step in (scores.steps[0], scores.steps[-1]))
    whole = first.keys() == last.keys() and _is_mean(before, first) and _is_mean(after, last)
    if not whole:
        return Change(before=before, after=after, interval=None)
    change = np.array([[last[prompt] - first[prompt]] for prompt in first])
    (paired,) = interval_of_means({"change": change})
    return Change(before=before, after=after, interval=(paired.low, paired.high))


def _is_mean(score: float, kept: Mapping[Any, float]) -> bool:
    return bool(kept) and math.isclose(fmean(kept.values()), score, abs_tol=1e-9)


def _by_prompt(rows: Sequence[Mapping[str, Any]], step: int) -> dict[tuple[str, str], float]:
    """Mean reward of the responses to each."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["step"] == step:
            scores.setdefault((row["prompt"], str(row["answer"])), []).append(row["reward"])
    return {prompt: fmean(found) for prompt, found in scores.items()}
