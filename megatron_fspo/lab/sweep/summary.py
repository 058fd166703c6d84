"""The results of a sweep: every run's figures, and by arm their mean over seeds with an interval.

Runs of one seed begin from the same weights, prompts and random numbers, so arms are compared seed by seed.
Figures of clipping are of the steps after the band of the arm that others are matched to was calibrated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fspo.evaluation.intervals import t_half_width
from megatron_fspo.evaluation.tables import markdown, number, plain
from megatron_fspo.lab.report.history import (
    History,
    Records,
    clip_rates,
    overall_rates,
    pooled_lre,
    read_records,
    signed_errors,
    steady,
)
from megatron_fspo.lab.report.samples import accuracy_change, first_and_last_samples
from megatron_fspo.lab.sweep.file import Planned, Sweep, planned
from megatron_fspo.record.rows import is_evaluation

COLUMNS = {
    "clipped": "clipped",
    "out_of_band": "outside",
    "lre_signed": "LRE clipped",
    "lre_signed_null": "by chance",
    "lre_within_sign": "within a sign",
    "lre_within_update": "within a step",
    "by_sign": "between signs",
    "by_update": "between steps",
    "lre_mean": "LRE outside",
    "lre_null": "by chance",
    "ess": "ESS",
    "reward_last": "reward",
    "accuracy_before": "held out before",
    "accuracy_after": "after",
    "length_last": "length",
}
"""Figure → its head in the table."""
_STEPS = 5
"""Behind the first and the last reward and length."""


def mean_over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Return ``value``, the mean over seeds, and ``half_width`` of its 95% t interval, NaN for one seed."""
    return {"value": fmean(values), "half_width": t_half_width(values)}


def summarize(sweep: Sweep) -> dict[str, Any]:
    """The summary of a sweep whose runs are all made: ``runs``, ``arms``, and with ``match`` ``differences``:
    each arm's figures less those of the arm it is matched to, and in how many seeds they are above."""
    runs = [
        {"arm": run.arm, "seed": run.seed, **figures(sweep.folder / run.name, compared(sweep, run))}
        for run in planned(sweep)
    ]
    by_arm: dict[str, list[dict[str, float]]] = {arm: [] for arm in sweep.arms}
    for run in runs:
        by_arm[run["arm"]].append({k: v for k, v in run.items() if isinstance(v, float) and math.isfinite(v)})
    arms = {
        arm: {name: mean_over_seeds([run[name] for run in mine]) for name in _in_all(mine)}
        for arm, mine in by_arm.items()
    }
    summary: dict[str, Any] = {"runs": runs, "arms": arms}
    if sweep.match is not None:
        models = by_arm.pop(sweep.match)
        summary["differences"] = {arm: _differences(mine, models) for arm, mine in by_arm.items()}
    return summary


def _in_all(runs: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in runs[0] if all(name in run for run in runs)]


def compared(sweep: Sweep, run: Planned) -> Records:
    """Return the records of a run behind its figures of clipping."""
    folder = sweep.folder / run.name
    if sweep.match is None:
        return steady(read_records(folder), History(folder))
    model, records = sweep.folder / f"{sweep.match}-{run.seed}", read_records(folder)
    return records.select(records.step >= steady(read_records(model), History(model)).step.min())


def figures(folder: Path, records: Records) -> dict[str, Any]:
    """Return the figures of one run; those of clipping are over ``records``."""
    history = History(folder)
    reward, length = history.series("critic/rewards/mean"), history.series("response_length/mean")
    lre, rates, signed = pooled_lre(records), overall_rates(records), signed_errors(records)
    norm, spikes = history.series("actor/grad_norm"), history.series("actor/grad_norm/max")
    figures = {
        "records": len(records),
        "clipped": rates.clipped,
        "lre_signed": signed["length"].mean,
        "lre_signed_interval": signed["length"].mean_interval,
        "lre_signed_null": signed["length"].null_mean,
        "lre_within_sign": signed["within_sign"].mean,
        "lre_within_update": signed["within_update"].mean,
        "by_sign": signed["sign"].mean,
        "by_update": signed["update"].mean,
        "grad_norm_spike": float(np.nanmax(spikes.values) / np.nanmedian(norm.values)),
        "out_of_band": rates.out_of_band,
        "lre_mean": lre.mean,
        "lre_mean_interval": lre.mean_interval,
        "lre_max": lre.max,
        "lre_max_interval": lre.max_interval,
        "lre_null": lre.null_mean,
        "lre_max_null": lre.null_max,
        "ess": rates.ess,
        "by_length": [asdict(bin) for bin in clip_rates(records)],
        "exponent": history.series("fspo/exponent").last(1),
        "reward_first": reward.first(_STEPS),
        "reward_last": reward.last(_STEPS),
        "length_first": length.first(_STEPS),
        "length_last": length.last(_STEPS),
    }
    for name in history.names():
        if is_evaluation(name):
            figures[f"accuracy/{name.split('/')[1]}"] = float(history.series(name).values[-1])
    # None with fewer than two evaluations.
    if (change := accuracy_change(history, first_and_last_samples(folder, history))) is not None:
        figures["accuracy_before"], figures["accuracy_after"] = change.before, change.after
        figures["accuracy_change"] = change.after - change.before
        if change.interval is not None:
            figures["accuracy_change_interval"] = change.interval
    return figures


def table(summary: Mapping[str, Any], match: str | None) -> str:
    """Return the arms as Markdown, means over seeds with the half width of their 95% interval."""
    names = [name for name in COLUMNS if any(name in arm for arm in summary["arms"].values())]
    rows = [
        [arm, *(_cell(means[name]) if name in means else "–" for name in names)]
        for arm, means in summary["arms"].items()
    ]
    lines = [markdown(["arm", *(COLUMNS[name] for name in names)], rows)]
    for arm, differences in summary.get("differences", {}).items():
        one = differences["lre_signed"]
        above = f"above it in {one['above']} of {one['seeds']} seeds"
        lines.append(f"\n{arm} less {match}, LRE of what is clipped: {_cell(one)}; {above}")
    return "\n".join(lines)


def as_json(summary: Mapping[str, Any]) -> str:
    """Return the summary with null where there is no number."""
    return json.dumps(plain(summary), indent=1) + "\n"


def _cell(mean: Mapping[str, float]) -> str:
    form = ".1f" if abs(mean["value"]) >= 10 else ".3f"
    half = number(mean["half_width"], form, "")
    return f"{mean['value']:{form}}" + (f" ± {half}" if half else "")


def _differences(
    runs: Sequence[Mapping[str, float]], models: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    differences: dict[str, dict[str, float]] = {}
    for name in _in_all([*runs, *models]):
        values = [run[name] - model[name] for run, model in zip(runs, models, strict=True)]
        above = sum(value > 0 for value in values)
        differences[name] = mean_over_seeds(values) | {"above": above, "seeds": len(values)}
    return differences
