"""Responses to the same prompts before and after training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 10
_PROMPT, _RESPONSE = 400, 900
"""Characters shown, at most."""


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
        """Of the reward."""
        return self.after.reward - self.before.reward


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """What two evaluations answered."""

    first: int
    """Step of the first evaluation."""
    last: int
    kept: int
    """Responses that both evaluations kept, those not shown among them."""
    better: int
    """Of them, with a higher reward in the last."""
    worse: int
    shown: list[Pair]


def before_after(rows: Sequence[Mapping[str, Any]]) -> BeforeAfter | None:
    """The responses of the first and the last evaluation to the same prompts; None where there are no two.

    Shown is one for each prompt before a prompt comes again: those whose reward changed before others, and in
    the order of the evaluation. Nothing is drawn by chance.

    Args:
        rows: of ``samples.jsonl``, with ``step``, ``prompt``, ``response`` and ``reward``.
    """
    steps = sorted({row["step"] for row in rows})
    if len(steps) < 2:
        return None
    first, last = (_by_prompt(row for row in rows if row["step"] == step) for step in (steps[0], steps[-1]))
    both = [key for key in first if key in last]
    if not both:
        return None
    pairs = {key: _pair(first[key], last[key]) for key in both}
    order = sorted(both, key=lambda key: (pairs[key].change == 0, key[1]))  # stable: else as they came
    firsts = set({prompt: (prompt, number) for prompt, number in reversed(order)}.values())
    order.sort(key=lambda key: key not in firsts)
    return BeforeAfter(
        first=steps[0],
        last=steps[-1],
        kept=len(both),
        better=sum(pair.change > 0 for pair in pairs.values()),
        worse=sum(pair.change < 0 for pair in pairs.values()),
        shown=[pairs[key] for key in order[:SHOWN]],
    )


def shortened(text: str, most: int) -> str:
    """At most so many characters of a text: two thirds from its beginning, one from its end, and between them
    how many are missing. What UTF-8 cannot hold becomes a question mark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    head, tail = 2 * most // 3, most // 3
    return f"{text[:head]} [… {len(text) - head - tail:,} characters …] {text[-tail:]}"


def _by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """By prompt and number of the response to it."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        number = seen.get(row["prompt"], 0)
        seen[row["prompt"]] = number + 1
        found[row["prompt"], number] = row
    return found


def _pair(before: Mapping[str, Any], after: Mapping[str, Any]) -> Pair:
    answers = [
        Answer(response=shortened(row["response"], _RESPONSE), reward=row["reward"])
        for row in (before, after)
    ]
    return Pair(prompt=shortened(before["prompt"], _PROMPT), before=answers[0], after=answers[1])
