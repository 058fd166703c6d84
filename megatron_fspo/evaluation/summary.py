"""Figures of completions per problem, per set and over sets, and comparison of two evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.estimators import Array, majority_at, pass_at
from megatron_fspo.evaluation.intervals import Estimate, interval_of_means
from megatron_fspo.evaluation.records import Problem, Record, SavedEvaluation

Quantities = dict[str, Array]
"""Figure → one value per problem [P], in the order of their indices.

``mean``: mean score; ``pass@k``; ``maj@k``; ``length``: tokens; ``truncated`` and ``unanswered``: shares of
responses that reached the length limit, and without an extracted answer."""
_SHOWN = 5
"""Maximum number of problems in a message."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of one evaluation, or differences of two."""

    samples: Mapping[str, int]
    """Set → completions per problem."""
    problems: Mapping[str, int]
    sets: Mapping[str, Mapping[str, Estimate]]
    """Set → quantity → figure."""
    average: Mapping[str, Estimate]
    """Quantity → mean over the sets, for quantities that all sets have."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Paired comparison of an evaluation with another one."""

    model: str
    """Checkpoint of the other evaluation."""
    summary: Summary
    changed: Mapping[str, tuple[object, object]]
    """Facts that differ, as (other, this); hashes of prompts and weights are excluded."""
    differences: Summary
    """This minus other, for quantities of both; ``samples`` are those of this one."""


def per_problem(records: Iterable[Record]) -> dict[str, Quantities]:
    """Return set → figures of each problem, with sets in order of their first record. Problems of a set must
    have the same number of completions."""
    sets: dict[str, dict[int, list[Record]]] = {}
    for record in sorted(records, key=lambda record: record.sample):
        sets.setdefault(record.dataset, {}).setdefault(record.index, []).append(record)
    return {name: _quantities([rows for _, rows in sorted(table.items())]) for name, table in sets.items()}


def _quantities(problems: Sequence[Sequence[Record]]) -> Quantities:
    n = len(problems[0])
    scores = [[record.score for record in rows] for rows in problems]
    answers = [[record.answer for record in rows] for rows in problems]
    right = [sum(score >= 1 for score in row) for row in scores]
    figures: dict[str, list[float]] = {"mean": [sum(row) / n for row in scores]}
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    figures |= {f"pass@{k}": [pass_at(k, n, c) for c in right] for k in ks}
    figures |= {f"maj@{k}": [majority_at(k, *pair) for pair in zip(answers, scores, strict=True)] for k in ks}
    figures["length"] = [sum(record.tokens for record in rows) / n for rows in problems]
    figures["truncated"] = [sum(r.finish_reason == "length" for r in rows) / n for rows in problems]
    figures["unanswered"] = [row.count(None) / n for row in answers]
    return {name: np.array(values, dtype=np.float64) for name, values in figures.items()}


def summarize(sets: Mapping[str, Quantities], samples: int | Mapping[str, int]) -> Summary:
    """Return means over problems with intervals, for the result of :func:`per_problem` or differences of two.
    ``samples`` is the number of completions per problem, or set → number."""

    def estimates(given: Mapping[str, Quantities]) -> dict[str, Estimate]:
        first, *others = given.values()
        names = [name for name in first if all(name in other for other in others)]
        tables = {dataset: np.stack([values[name] for name in names], 1) for dataset, values in given.items()}
        return dict(zip(names, interval_of_means(tables), strict=True))

    return Summary(
        samples=dict.fromkeys(sets, samples) if isinstance(samples, int) else {n: samples[n] for n in sets},
        problems={dataset: len(values["mean"]) for dataset, values in sets.items()},
        sets={dataset: estimates({dataset: values}) for dataset, values in sets.items()},
        average=estimates(sets),
    )


def compare(this: SavedEvaluation, other: SavedEvaluation) -> Comparison:
    """Compute ``this`` minus ``other`` on the same problems, matched by their ids. Raises ``InputError`` if
    the problems differ."""
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
    """Return set → rows in ``theirs`` of the problems in ``mine``, both in order of index. Raises
    ``InputError`` if the problems differ; ``between`` names the evaluations in its message."""
    ours, others = _named_once(mine), _named_once(theirs)
    lists = []
    for where, these, rest in (("first", ours, others), ("second", others, ours)):
        alone = [str(problem) for name, problem in these.items() if name not in rest]
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
    """Return (set, id, earlier occurrences of it) → problem, in order of index; files may repeat problems."""
    seen: Counter[tuple[str, str]] = Counter()
    named = {}
    for problem in sorted(problems, key=lambda problem: problem.index):
        name = (problem.dataset, problem.id)
        named[*name, seen[name]] = problem
        seen[name] += 1
    return named
