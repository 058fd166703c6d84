"""The first and the last evaluation of a run: how far accuracy came, and responses before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fspo.evaluation.intervals import interval_of_means
from megatron_fspo.lab.report.history import History
from megatron_fspo.record.rows import SAMPLES, read_rows, rows_from_end

_MOST, _PARTS = 840, 60
"""Characters shown of a response, with some more for each part of a trajectory, and parts."""


@dataclass(frozen=True, kw_only=True)
class AccuracyChange:
    """Accuracy on the prompts of the first set, in the first evaluation and in the last."""

    before: float
    after: float
    interval: tuple[float, float] | None
    """95% interval of ``after - before``, paired prompt by prompt; None unless every response was kept
    (``log.responses``)."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Rows of a prompt in the first evaluation and in the last, as long as they are shown."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def change(self) -> float:
        """Difference of the rewards."""
        change: float = self.after["reward"] - self.before["reward"]
        return change


def first_and_last_samples(folder: Path, history: History) -> list[dict[str, Any]]:
    """Read the rows of ``samples.jsonl`` of the first and the last evaluation; others stay on the disk."""
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


def accuracy_change(history: History, samples: Sequence[Mapping[str, Any]]) -> AccuracyChange | None:
    """Return the change of accuracy over a run, by its rows and :func:`first_and_last_samples`; None with
    fewer than two evaluations."""
    name = history.evaluation()
    if name is None or len(scores := history.series(name)) < 2:
        return None
    before, after = float(scores.values[0]), float(scores.values[-1])
    first, last = (_mean_rewards(samples, step) for step in (scores.steps[0], scores.steps[-1]))
    interval = None
    if first and first.keys() == last.keys():
        means = fmean(first.values()), fmean(last.values())
        if np.allclose(means, (before, after), rtol=1e-9, atol=1e-9):  # every response was kept
            change = np.array([[last[prompt] - first[prompt]] for prompt in first])
            (paired,) = interval_of_means({"change": change})
            interval = (paired.low, paired.high)
    return AccuracyChange(before=before, after=after, interval=interval)


def _mean_rewards(rows: Sequence[Mapping[str, Any]], step: int) -> dict[tuple[str, str], float]:
    """Return prompt and answer → mean reward of the responses."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["step"] == step:
            scores.setdefault((row["prompt"], str(row["answer"])), []).append(row["reward"])
    return {prompt: fmean(rewards) for prompt, rewards in scores.items()}


def before_after(rows: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Return the responses of the first and the last evaluation in these rows of ``samples.jsonl`` to the
    same prompts; none where there are no two.

    There is one for each prompt before a prompt comes again: those whose reward changed before others, and in
    the order of the evaluation. Nothing is drawn by chance.
    """
    steps = sorted({row["step"] for row in rows})
    if len(steps) < 2:
        return []
    first, last = (_numbered(row for row in rows if row["step"] == step) for step in (steps[0], steps[-1]))
    pairs = {key: Pair(before=first[key], after=last[key]) for key in first if key in last}
    order = sorted(pairs, key=lambda key: (pairs[key].change == 0, key[1]))  # stable: else as they came
    firsts = set({prompt: (prompt, number) for prompt, number in reversed(order)}.values())
    order.sort(key=lambda key: key not in firsts)
    return [pairs[key] for key in order]


def _numbered(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return prompt and number of the response to it → row, with its texts shortened."""
    numbered: dict[tuple[str, int], Mapping[str, Any]] = {}
    seen: Counter[str] = Counter()
    for row in rows:
        parts = row.get("parts") or [("wrote", row["response"])]
        most = _MOST // len(parts) + 60
        shown = {
            "prompt": shortened(row["prompt"], 400),
            "parts": [(kind, shortened(text, most)) for kind, text in parts[:_PARTS]],
        }
        numbered[row["prompt"], seen[row["prompt"]]] = {**row, **shown}
        seen[row["prompt"]] += 1
    return numbered


def shortened(text: str, most: int) -> str:
    """Return at most so many characters of a text: two thirds from its beginning, one from its end, and
    between them how many are missing. What UTF-8 cannot hold becomes a question mark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    head, tail = 2 * most // 3, most // 3
    return f"{text[:head]} [… {len(text) - head - tail:,} characters …] {text[-tail:]}"
