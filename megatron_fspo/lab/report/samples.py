"""The first and the last evaluation of a run: how far accuracy came, and the responses to browse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fspo.evaluation.intervals import interval_of_means
from megatron_fspo.lab.report.history import History
from megatron_fspo.record.rows import SAMPLES, read_rows, rows_from_end

_MOST, _PARTS = 840, 60
"""Characters shown of a response, with some more for each part of a trajectory, and parts."""
_RESPONSES, _STEPS = 240, 12
"""Responses, and evaluations, on the page at most."""
_WHOLE = 2**24
"""Bytes of a ``samples.jsonl`` that is read as a whole, in half a second."""


@dataclass(frozen=True, kw_only=True)
class AccuracyChange:
    """Accuracy on the prompts of the first set, in the first evaluation and in the last."""

    before: float
    after: float
    interval: tuple[float, float] | None
    """95% interval of ``after - before``, paired prompt by prompt; None unless every response was kept
    (``log.responses``)."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The responses to a prompt over the evaluations, as long as they are shown."""

    prompt: str
    responses: Sequence[Mapping[str, Any]]
    """``step``, ``reward`` and ``parts`` of each; the first and the last evaluation among them."""

    @property
    def change(self) -> float:
        """Difference of the rewards of the last and of the first."""
        return float(self.responses[-1]["reward"] - self.responses[0]["reward"])


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


def browsed(folder: Path, ends: Sequence[Mapping[str, Any]]) -> list[Answered]:
    """Return responses of the evaluations to the same prompts; none where there are no two evaluations. Of a
    large ``samples.jsonl`` those of the first and the last, which are ``ends``.

    There is one for each prompt before a prompt comes again: those whose reward changed before others, and in
    the order of the evaluation. Nothing is drawn by chance.
    """
    path = folder / SAMPLES
    rows = read_rows(path) if path.exists() and path.stat().st_size <= _WHOLE else ends
    steps = {step: _numbered(group) for step, group in groupby(rows, key=lambda row: row["step"])}
    if len(steps) < 2:
        return []
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).round().astype(int))
    numbered = [steps[sorted(steps)[at]] for at in kept]
    found = {
        key: Answered(prompt=shortened(key[0], 400), responses=[one[key] for one in numbered if key in one])
        for key in numbered[0]
        if key in numbered[-1]
    }
    order = sorted(found, key=lambda key: (found[key].change == 0, key[1]))  # stable: else as they came
    firsts = set({prompt: (prompt, number) for prompt, number in reversed(order)}.values())
    order.sort(key=lambda key: key not in firsts)
    return [found[key] for key in order[: _RESPONSES // len(numbered)]]


def _numbered(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return prompt and number of the response to it → what is shown of its row, texts shortened."""
    numbered: dict[tuple[str, int], Mapping[str, Any]] = {}
    seen: Counter[str] = Counter()
    for row in rows:
        parts = row.get("parts") or [("wrote", row["response"])]
        most = _MOST // len(parts) + 60
        shown = {"parts": [(kind, shortened(text, most)) for kind, text in parts[:_PARTS]]}
        numbered[row["prompt"], seen[row["prompt"]]] = {"step": row["step"], "reward": row["reward"], **shown}
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
