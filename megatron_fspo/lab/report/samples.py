"""The first and the last evaluation of a run: how far accuracy came, and responses before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fspo.evaluation.intervals import interval_of_means
from megatron_fspo.lab.report.history import History
from megatron_fspo.record.log import SAMPLES, read_rows, rows_from_end

SHOWN = 10
_PROMPT, _RESPONSE = 400, 900
"""Characters shown, at most."""


@dataclass(frozen=True, kw_only=True)
class AccuracyChange:
    """Accuracy on the prompts of the first set, in the first evaluation and in the last."""

    before: float
    after: float
    interval: tuple[float, float] | None
    """95% interval of ``after - before``, paired prompt by prompt; None unless every response was kept
    (``log.responses``)."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response as it is shown."""

    response: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prompt, with its response in the first evaluation and in the last."""

    prompt: str
    before: Answer
    after: Answer

    @property
    def change(self) -> float:
        """Difference of the rewards."""
        return self.after.reward - self.before.reward


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Responses of two evaluations to the same prompts."""

    first: int
    """Step of the first evaluation."""
    last: int
    kept: int
    """Responses that both evaluations kept, those not shown among them."""
    better: int
    """Responses with a higher reward in the last."""
    worse: int
    shown: list[Pair]


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


def accuracy_change(history: History, samples: Sequence[Mapping[str, Any]]) -> AccuracyChange | None:
    """The change of accuracy over a run; None with fewer than two evaluations.

    Args:
        history: the rows of the run.
        samples: from :func:`first_and_last_samples`.
    """
    name = history.evaluation()
    if name is None or len(scores := history.series(name)) < 2:
        return None
    before, after = float(scores.values[0]), float(scores.values[-1])
    first, last = (_mean_rewards(samples, step) for step in (scores.steps[0], scores.steps[-1]))
    interval = None
    if first.keys() == last.keys() and _is_mean(before, first) and _is_mean(after, last):
        change = np.array([[last[prompt] - first[prompt]] for prompt in first])
        (paired,) = interval_of_means({"change": change})
        interval = (paired.low, paired.high)
    return AccuracyChange(before=before, after=after, interval=interval)


def _is_mean(score: float, kept: Mapping[Any, float]) -> bool:
    return bool(kept) and math.isclose(fmean(kept.values()), score, abs_tol=1e-9)


def _mean_rewards(rows: Sequence[Mapping[str, Any]], step: int) -> dict[tuple[str, str], float]:
    """Prompt and answer → mean reward of the responses."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["step"] == step:
            scores.setdefault((row["prompt"], str(row["answer"])), []).append(row["reward"])
    return {prompt: fmean(rewards) for prompt, rewards in scores.items()}


def before_after(rows: Sequence[Mapping[str, Any]]) -> BeforeAfter | None:
    """The responses of the first and the last evaluation to the same prompts; None where there are no two.

    Shown is one for each prompt before a prompt comes again: those whose reward changed before others, and in
    the order of the evaluation. Nothing is drawn by chance.

    Args:
        rows: lines of ``samples.jsonl``, with ``step``, ``prompt``, ``response`` and ``reward``.
    """
    steps = sorted({row["step"] for row in rows})
    if len(steps) < 2:
        return None
    first, last = (_numbered(row for row in rows if row["step"] == step) for step in (steps[0], steps[-1]))
    pairs = {key: _pair(first[key], last[key]) for key in first if key in last}
    if not pairs:
        return None
    order = sorted(pairs, key=lambda key: (pairs[key].change == 0, key[1]))  # stable: else as they came
    firsts = set({prompt: (prompt, number) for prompt, number in reversed(order)}.values())
    order.sort(key=lambda key: key not in firsts)
    return BeforeAfter(
        first=steps[0],
        last=steps[-1],
        kept=len(pairs),
        better=sum(pair.change > 0 for pair in pairs.values()),
        worse=sum(pair.change < 0 for pair in pairs.values()),
        shown=[pairs[key] for key in order[:SHOWN]],
    )


def _numbered(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Prompt and number of the response to it → row."""
    numbered: dict[tuple[str, int], Mapping[str, Any]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        number = seen.get(row["prompt"], 0)
        seen[row["prompt"]] = number + 1
        numbered[row["prompt"], number] = row
    return numbered


def _pair(before: Mapping[str, Any], after: Mapping[str, Any]) -> Pair:
    answers = [
        Answer(response=shortened(row["response"], _RESPONSE), reward=row["reward"])
        for row in (before, after)
    ]
    return Pair(prompt=shortened(before["prompt"], _PROMPT), before=answers[0], after=answers[1])


def shortened(text: str, most: int) -> str:
    """Return at most so many characters of a text: two thirds from its beginning, one from its end, and
    between them how many are missing. What UTF-8 cannot hold becomes a question mark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    head, tail = 2 * most // 3, most // 3
    return f"{text[:head]} [… {len(text) - head - tail:,} characters …] {text[-tail:]}"
