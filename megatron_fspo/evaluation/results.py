"""Writes the figures of an evaluation: ``table.md`` for papers, ``results.json`` for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_fspo.evaluation.intervals import LEVEL, RESAMPLES
from megatron_fspo.evaluation.records import EvaluationManifest, write_whole
from megatron_fspo.evaluation.summary import Comparison, Summary
from megatron_fspo.evaluation.tables import markdown, plain

RESULTS = "results.json"
TABLE = "table.md"
AVERAGE = "average"


def summary_metrics(summary: Summary, group: str = "val") -> dict[str, float]:
    """Return the figures by the metric names of a training run."""
    metrics: dict[str, float] = {}
    for dataset, estimates in summary.sets.items():
        n, name = summary.samples[dataset], f"{group}/{dataset}"
        metrics[f"{name}/mean@{n}"] = estimates["mean"].value
        metrics[f"{name}/mean@{n}/low"] = estimates["mean"].low
        metrics[f"{name}/mean@{n}/high"] = estimates["mean"].high
        ks = _drawn(estimates)
        metrics |= {f"{name}/pass@{k}": estimates[f"pass@{k}"].value for k in ks}
        metrics[f"{name}/maj@{ks[-1]}"] = estimates[f"maj@{ks[-1]}"].value
        metrics[f"{name}/response_length/mean"] = estimates["length"].value
        metrics[f"{name}/truncated"] = estimates["truncated"].value
    return metrics


def write(
    folder: Path, manifest: EvaluationManifest, summary: Summary, comparison: Comparison | None = None
) -> None:
    """Write ``table.md`` and ``results.json``, each atomically."""
    content: dict[str, Any] = {
        "model": manifest.model,
        "samples": manifest.samples,
        "interval": {"level": LEVEL, "resamples": RESAMPLES, "of": "problems", "kind": "BCa and t"},
        **_figures(summary),
        "facts": dict(manifest.facts),
    }
    if comparison is not None:
        content["comparison"] = {
            "with": comparison.model,
            "other": _figures(comparison.summary),
            "changed": comparison.changed,
            "difference": _figures(comparison.differences),
        }
    write_whole(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_whole(folder / TABLE, table(manifest.model, summary, comparison))


def table(model: str, summary: Summary, comparison: Comparison | None = None) -> str:
    """Return Markdown: a table with a row per model, then one with a row per set and all figures."""
    sets = [*summary.sets, *([AVERAGE] if len(summary.sets) > 1 else [])]
    rows = [(f"`{model}`", summary, "")]
    if comparison is not None:
        before = (f"`{comparison.model}`", comparison.summary, "")
        rows = [before, *rows, ("difference", comparison.differences, "+")]
    summaries = [summary for _, summary, _ in rows]
    heads = ["model", *(head for name in sets for head in _heads(summaries, name))]
    paragraphs = [
        "Scores × 100, with 95 % intervals (BCa bootstrap over problems, and t"
        + ("; the difference is paired, problem by problem)." if comparison else ")."),
        markdown(heads, [[label, *_cells(summary, sets, sign)] for label, summary, sign in rows]),
    ]
    if comparison is not None and comparison.changed:
        changes = (f"`{key}` {was} → {now}" for key, (was, now) in comparison.changed.items())
        paragraphs.append(f"Besides the weights, these settings differ: {', '.join(changes)}.")
    return "\n\n".join([*paragraphs, _details(summary)]) + "\n"


def _heads(summaries: Sequence[Summary], name: str) -> list[str]:
    """Return the column heads of a set or of the average, with ``@k`` if k is equal in all rows. The average
    of sets with different k has "mean" without k, and the largest pass@k and maj@k that all sets have."""
    means = _at(
        k
        for summary in summaries
        for k in ([summary.samples[name]] if name in summary.samples else summary.samples.values())
    )
    drawn = _at(_drawn(summary.sets.get(name, summary.average))[-1] for summary in summaries)
    return [f"{name} mean{means}", f"{name} pass{drawn}", f"{name} maj{drawn}"]


def _at(ks: Iterable[int]) -> str:
    different = set(ks)
    return f"@{different.pop()}" if len(different) == 1 else ""


def _cells(summary: Summary, sets: Sequence[str], sign: str) -> Iterable[str]:
    for name in sets:
        estimates = summary.sets.get(name, summary.average)
        largest = _drawn(estimates)[-1]
        for key in ("mean", f"pass@{largest}", f"maj@{largest}"):
            estimate = estimates[key]
            value, low, high = (_percent(x, sign) for x in (estimate.value, estimate.low, estimate.high))
            yield f"{value} [n/a]" if math.isnan(estimate.low) else f"{value} [{low}, {high}]"


def _drawn(figures: Iterable[str]) -> list[int]:
    """Return the k of pass@k and maj@k in increasing order."""
    return sorted(int(key.removeprefix("pass@")) for key in figures if key.startswith("pass@"))


def _details(summary: Summary) -> str:
    ks = sorted({k for estimates in summary.sets.values() for k in _drawn(estimates)})
    shares = [f"{figure}@{k}" for figure in ("pass", "maj") for k in ks] + ["truncated", "unanswered"]
    heads = ["set", "problems", "samples", f"mean{_at(summary.samples.values())}", *shares[:-1], "no answer"]
    lines = []
    for name, estimates in summary.sets.items():
        counts = [str(summary.problems[name]), str(summary.samples[name])]
        cells = [name, *counts, _percent(estimates["mean"].value)]
        cells += [_percent(estimates[key].value) if key in estimates else "" for key in shares]
        lines.append([*cells, f"{estimates['length'].value:.1f}"])
    return markdown([*heads, "tokens"], lines)


def _percent(value: float, sign: str = "") -> str:
    """Format a share × 100 with one decimal, without negative zero."""
    return f"{round(100 * value, 1) + 0.0:{sign}.1f}"


def _figures(summary: Summary) -> dict[str, Any]:
    content: dict[str, Any] = {
        "sets": {
            name: {"problems": summary.problems[name], **plain(estimates)}
            for name, estimates in summary.sets.items()
        }
    }
    return content | ({AVERAGE: plain(summary.average)} if len(summary.sets) > 1 else {})
