"""Figures of completions: per problem, per set, over sets; and two evaluations compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.estimators import Array, majority_at, pass_at, powers_of_two
from megatron_fspo.evaluation.intervals import Estimate, interval_of_means
from megatron_fspo.evaluation.records import Problem, Record, SavedEvaluation

Quantities = dict[str, Array]
"""Figure → one value per problem [P], in the order of their indices.

``mean``: mean score; ``pass@k``; ``maj@k``; ``length``: tokens; ``truncated`` and ``unanswered``: shares of
the responses that were cut off, and from which no answer was extracted."""
_SHOWN = 5
"""Problems that a message names."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of one evaluation, or differences between two."""

    samples: Mapping[str, int]
    """Completions of each problem, by set."""
    problems: Mapping[str, int]
    """Number of problems, by set."""
    sets: Mapping[str, Mapping[str, Estimate]]
    """Figures by set, by quantity."""
    average: Mapping[str, Estimate]
    """Mean over the sets by quantity, of those that all sets have."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One evaluation less another, problem by problem."""

    model: str
    """The other evaluation's."""
    summary: Summary
    """The other evaluation's figures."""
    changed: Mapping[str, tuple[object, object]]
    """Facts that are not the same: (the other's, this one's). Prompts and weights are left out."""
    differences: Summary
    """The quantities that both have; ``samples`` are this one's."""


def per_problem(records: Iterable[Record]) -> dict[str, Quantities]:
    """Figures of each problem, by set, in the order in which the sets come, of at least one record; problems
    of a set have the same number of completions."""
    sets: dict[str, dict[int, list[Record]]] = {}
    for record in sorted(records, key=lambda record: record.sample):
        sets.setdefault(record.dataset, {}).setdefault(record.index, []).append(record)
    return {name: _quantities([rows for _, rows in sorted(some.items())]) for name, some in sets.items()}


def _quantities(problems: Sequence[Sequence[Record]]) -> Quantities:
    n = len(problems[0])
    scores = [[record.score for record in rows] for rows in problems]
    answers = [[record.answer for record in rows] for rows in problems]
    right = [sum(score >= 1 for score in row) for row in scores]
    figures: dict[str, list[float]] = {"mean": [sum(row) / n for row in scores]}
    ks = powers_of_two(n)
    figures |= {f"pass@{k}": [pass_at(k, n, c) for c in right] for k in ks}
    figures |= {f"maj@{k}": [majority_at(k, *pair) for pair in zip(answers, scores, strict=True)] for k in ks}
    figures["length"] = [sum(record.tokens for record in rows) / n for rows in problems]
    figures["truncated"] = [sum(r.finish_reason == "length" for r in rows) / n for rows in problems]
    figures["unanswered"] = [row.count(None) / n for row in answers]
    return {name: np.array(values, dtype=np.float64) for name, values in figures.items()}


def summarize(sets: Mapping[str, Quantities], samples: int | Mapping[str, int]) -> Summary:
    """Means over problems with their intervals, of :func:`per_problem`'s sets, or of differences of two such;
    ``samples`` are completions of each problem, or by set."""

    def estimates(some: Mapping[str, Quantities]) -> dict[str, Estimate]:
        first, *others = some.values()
        names = [name for name in first if all(name in other for other in others)]
        tables = {dataset: np.stack([one[name] for name in names], 1) for dataset, one in some.items()}
        return dict(zip(names, interval_of_means(tables), strict=True))

    return Summary(
        samples=dict.fromkeys(sets, samples) if isinstance(samples, int) else {n: samples[n] for n in sets},
        problems={dataset: len(one["mean"]) for dataset, one in sets.items()},
        sets={dataset: estimates({dataset: one}) for dataset, one in sets.items()},
        average=estimates(sets),
    )


def compare(this: SavedEvaluation, other: SavedEvaluation) -> Comparison:
    """``this`` less ``other`` on the same problems, matched by what they ask.

    Raises:
        InputError: the problems differ; names some.
    """
    rows = match(this.problems, other.problems, f"{this.manifest.model} and {other.manifest.model}")
    mine, theirs = per_problem(this.records), per_problem(other.records)
    before, now = other.manifest.facts, this.manifest.facts
    names = [name for name in {**now, **before} if not name.endswith("sha256")]
    return Comparison(
        model=other.manifest.model,
        summary=summarize(theirs, other.manifest.samples),
        changed={n: (before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n)},
        differences=summarize(
            {
                dataset: {
                    name: values - theirs[dataset][name][rows[dataset]]
                    for name, values in figures.items()
                    if name in theirs[dataset]
                }
                for dataset, figures in mine.items()
            },
            this.manifest.samples,
        ),
    )


def match(mine: Sequence[Problem], theirs: Sequence[Problem], between: str) -> dict[str, list[int]]:
    """Returns by set, for each of my problems in the order of indices, the row of the same one of theirs.

    Raises ``InputError`` naming some if the problems of the two evaluations, ``between``, are not the same.
    """
    ours, others = _named_once(mine), _named_once(theirs)
    lists = []
    for where, some, rest in (("first", ours, others), ("second", others, ours)):
        alone = [str(problem) for name, problem in some.items() if name not in rest]
        if alone:
            more = [f"{len(alone) - _SHOWN} more"] if len(alone) > _SHOWN else []
            lists.append(f"only in the {where}: {', '.join([*alone[:_SHOWN], *more])}")
    if lists:
        raise InputError(f"{between} were evaluated on different problems: {'; '.join(lists)}")
    sizes: Counter[str] = Counter()
    row_of = {}
    for name in others:
        row_of[name] = sizes[name[0]]
        sizes[name[0]] += 1
    rows: dict[str, list[int]] = {}
    for name in ours:
        rows.setdefault(name[0], []).append(row_of[name])
    return rows


def _named_once(problems: Sequence[Problem]) -> dict[tuple[str, str, int], Problem]:
    """Problems by set, identity, and how often it came before (a file may hold one twice), by index."""
    seen: Counter[tuple[str, str]] = Counter()
    named = {}
    for problem in sorted(problems, key=lambda problem: problem.index):
        name = (problem.dataset, problem.id)
        named[*name, seen[name]] = problem
        seen[name] += 1
    return named
