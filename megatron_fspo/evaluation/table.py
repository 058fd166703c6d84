"""``table.md`` and ``results.json``: the figures of an evaluation, for a paper and for a program."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_fspo.evaluation.intervals import LEVEL, RESAMPLES, Estimate
from megatron_fspo.evaluation.records import Manifest
from megatron_fspo.evaluation.summary import Comparison, Summary

RESULTS = "results.json"
TABLE = "table.md"
AVERAGE = "average"


def metrics_of(summary: Summary, group: str = "val") -> dict[str, float]:
    """The figures under the names that a run logs them by."""
    metrics: dict[str, float] = {}
    for dataset, found in summary.sets.items():
        n, name = summary.samples[dataset], f"{group}/{dataset}"
        metrics[f"{name}/mean@{n}"] = found["mean"].value
        metrics[f"{name}/mean@{n}/low"] = found["mean"].low
        metrics[f"{name}/mean@{n}/high"] = found["mean"].high
        ks = _drawn(found)
        metrics |= {f"{name}/pass@{k}": found[f"pass@{k}"].value for k in ks}
        metrics[f"{name}/maj@{ks[-1]}"] = found[f"maj@{ks[-1]}"].value
        metrics[f"{name}/response_length/mean"] = found["length"].value
        metrics[f"{name}/truncated"] = found["truncated"].value
    return metrics


def results(manifest: Manifest, summary: Summary, comparison: Comparison | None = None) -> dict[str, Any]:
    """The content of ``results.json``, as JSON types."""
    content: dict[str, Any] = {
        "model": manifest.model,
        "samples": manifest.samples,
        "interval": {"level": LEVEL, "resamples": RESAMPLES, "of": "problems", "kind": "BCa"},
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
    return content


def write(folder: Path, manifest: Manifest, summary: Summary, comparison: Comparison | None = None) -> None:
    """Write both files, each whole or not at all."""
    texts = {
        RESULTS: json.dumps(results(manifest, summary, comparison), indent=1, allow_nan=False) + "\n",
        TABLE: table(manifest.model, summary, comparison),
    }
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.rename(folder / name)


def table(model: str, summary: Summary, comparison: Comparison | None = None) -> str:
    """Markdown: a row per model, per set three columns; below it, what else is known of every set."""
    sets = [*summary.sets, *([AVERAGE] if len(summary.sets) > 1 else [])]
    rows = [(f"`{model}`", summary, "")]
    if comparison is not None:
        before = (f"`{comparison.model}`", comparison.summary, "")
        rows = [before, *rows, ("difference", comparison.differences, "+")]
    summaries = [found for _, found, _ in rows]
    heads = ["model", *(head for name in sets for head in _heads(summaries, name))]
    lines = [[label, *_cells(found, sets, sign)] for label, found, sign in rows]
    parts = [
        "Scores × 100, with 95 % intervals (BCa bootstrap over problems"
        + ("; the difference is paired, problem by problem)." if comparison else ")."),
        _markdown(heads, lines),
    ]
    if comparison is not None and comparison.changed:
        told = (f"`{key}` {was} → {now}" for key, (was, now) in comparison.changed.items())
        parts.append(f"Besides the weights these differ: {', '.join(told)}.")
    parts.append(_details(summary))
    return "\n\n".join(parts) + "\n"


def _heads(summaries: Sequence[Summary], name: str) -> list[str]:
    """Of the columns of a set or of the average: with ``@k`` where one k holds in all rows. The average of
    sets with different k has a mean without, and the largest pass@k and maj@k that all of them have."""
    means = _at(
        k
        for found in summaries
        for k in ([found.samples[name]] if name in found.samples else found.samples.values())
    )
    drawn = _at(_drawn(_figures_of(found, name))[-1] for found in summaries)
    return [f"{name} mean{means}", f"{name} pass{drawn}", f"{name} maj{drawn}"]


def _at(ks: Iterable[int]) -> str:
    """``@k``, if that is one."""
    found = set(ks)
    return f"@{found.pop()}" if len(found) == 1 else ""


def _figures_of(summary: Summary, name: str) -> Mapping[str, Estimate]:
    """Of a set, or else of the average."""
    return summary.sets.get(name, summary.average)


def _cells(summary: Summary, sets: Sequence[str], sign: str) -> Iterable[str]:
    for name in sets:
        found = _figures_of(summary, name)
        largest = _drawn(found)[-1]
        for key in ("mean", f"pass@{largest}", f"maj@{largest}"):
            yield _with_interval(found[key], sign)


def _drawn(found: Iterable[str]) -> list[int]:
    """The k of pass@k and maj@k, from small to large."""
    return sorted(int(key.removeprefix("pass@")) for key in found if key.startswith("pass@"))


def _details(summary: Summary) -> str:
    ks = sorted({k for found in summary.sets.values() for k in _drawn(found)})
    shares = [f"{figure}@{k}" for figure in ("pass", "maj") for k in ks] + ["truncated", "unanswered"]
    heads = ["set", "problems", "samples", f"mean{_at(summary.samples.values())}", *shares, "tokens"]
    heads = [{"unanswered": "no answer"}.get(head, head) for head in heads]
    lines = []
    for name, figures in summary.sets.items():
        counts = [str(summary.problems[name]), str(summary.samples[name])]
        cells = [name, *counts, _percent(figures["mean"].value)]
        cells += [_percent(figures[key].value) if key in figures else "" for key in shares]
        lines.append([*cells, f"{figures['length'].value:.1f}"])
    return _markdown(heads, lines)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (heads, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def _with_interval(estimate: Estimate, sign: str) -> str:
    if math.isnan(estimate.low):
        return f"{_percent(estimate.value, sign)} [n/a]"
    low, high = _percent(estimate.low, sign), _percent(estimate.high, sign)
    return f"{_percent(estimate.value, sign)} [{low}, {high}]"


def _percent(value: float, sign: str = "") -> str:
    """One decimal; no minus before a zero."""
    return f"{round(100 * value, 1) + 0.0:{sign}.1f}"


def _figures(summary: Summary) -> dict[str, Any]:
    content: dict[str, Any] = {
        "sets": {
            name: {"problems": summary.problems[name], **_numbers(found)}
            for name, found in summary.sets.items()
        }
    }
    if len(summary.sets) > 1:
        content[AVERAGE] = _numbers(summary.average)
    return content


def _numbers(found: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    """JSON has no NaN."""
    return {
        key: {name: value if math.isfinite(value) else None for name, value in asdict(estimate).items()}
        for key, estimate in found.items()
    }
