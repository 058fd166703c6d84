"""What came of a sweep: every run's figures, and by arm their mean over seeds with an interval.

Runs of one seed begin from the same weights, prompts and random numbers, so arms are compared seed by seed.
Figures of clipping are of the steps after the band of the arm that others are matched to was calibrated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_fspo.lab.report.change import accuracy_change, first_and_last_samples
from megatron_fspo.lab.report.history import History, Records, overall_rates, pooled_lre, read_records
from megatron_fspo.lab.sweep.file import Planned, Sweep, planned
from megatron_fspo.lab.sweep.match import steady
from megatron_fspo.objective.exponent import student_t

COLUMNS = {
    "out_of_band": "outside",
    "lre_mean": "LRE mean",
    "lre_max": "LRE max",
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


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Over seeds."""

    value: float
    half_width: float
    """Of its 95% t interval; NaN of a single seed."""


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Mean of one value a seed, taken as independent and normal."""
    if len(values) < 2:
        return Mean(value=values[0], half_width=math.nan)
    error = stdev(values) / math.sqrt(len(values))
    return Mean(value=fmean(values), half_width=student_t(len(values) - 1) * error)


def summarize(sweep: Sweep) -> dict[str, Any]:
    """Of a sweep all of whose runs are made: ``runs``, ``arms``, and with ``match`` ``differences``: each
    arm's figures less those of the arm it is matched to, and in how many seeds they are above."""
    runs = []
    for run in planned(sweep):
        found_of = figures(sweep.folder / run.name, compared(sweep, run))
        runs.append({"arm": run.arm, "seed": run.seed, **found_of})
    by_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in sweep.arms}
    found: dict[str, Any] = {
        "runs": runs,
        "arms": {arm: _means([_numbers(run) for run in mine]) for arm, mine in by_arm.items()},
    }
    if sweep.match is not None:
        model_runs = [_numbers(run) for run in by_arm[sweep.match]]
        found["differences"] = {
            arm: _differences([_numbers(run) for run in mine], model_runs)
            for arm, mine in by_arm.items()
            if arm != sweep.match
        }
    return found


def _accuracy(folder: Path) -> dict[str, Any]:
    """Of the first and the last evaluation; nothing of a run with fewer than two."""
    history = History(folder)
    if (change := accuracy_change(history, first_and_last_samples(folder, history))) is None:
        return {}
    found: dict[str, Any] = {
        "accuracy_before": change.before,
        "accuracy_after": change.after,
        "accuracy_change": change.after - change.before,
    }
    if change.interval is not None:
        found["accuracy_change_interval"] = change.interval
    return found


def compared(sweep: Sweep, run: Planned) -> Records:
    """The records of a run that the figures of clipping are of."""
    folder = sweep.folder / run.name
    if sweep.match is None:
        return steady(read_records(folder), History(folder))
    model, records = sweep.folder / f"{sweep.match}-{run.seed}", read_records(folder)
    return records.select(records.step >= steady(read_records(model), History(model)).step.min())


def figures(folder: Path, records: Records) -> dict[str, Any]:
    """Of one run; clipping of ``records`` only."""
    series = History(folder).series
    reward, length = series("critic/rewards/mean"), series("response_length/mean")
    lre, rates = pooled_lre(records), overall_rates(records)
    return {
        "records": len(records),
        "out_of_band": rates.out_of_band,
        "lre_mean": lre.mean,
        "lre_mean_interval": lre.mean_interval,
        "lre_max": lre.max,
        "lre_max_interval": lre.max_interval,
        "lre_null": lre.null_mean,
        "lre_max_null": lre.null_max,
        "ess": rates.ess,
        "by_length": [
            {"low": one.low, "high": one.high, "out_of_band": 1 - one.accepted_rate} for one in lre.bins
        ],
        "exponent": series("fspo/exponent").last(1),
        "reward_first": reward.first(_STEPS),
        "reward_last": reward.last(_STEPS),
        "length_first": length.first(_STEPS),
        "length_last": length.last(_STEPS),
        **_accuracy(folder),
    }


def table(found: Mapping[str, Any], match: str | None) -> str:
    """The arms as Markdown, means over seeds with the half width of their 95% interval."""
    names = [name for name in COLUMNS if any(name in arm for arm in found["arms"].values())]
    lines = [f"| arm | {' | '.join(COLUMNS[name] for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for arm, means in found["arms"].items():
        cells = [_cell(means[name]) if name in means else "–" for name in names]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    for arm, figures_of in found.get("differences", {}).items():
        one = figures_of["lre_mean"]
        above = f"above it in {one['above']} of {one['seeds']} seeds"
        lines.append(f"\n{arm} less {match}, LRE mean: {_cell(one)}; {above}")
    return "\n".join(lines)


def as_json(found: Mapping[str, Any]) -> str:
    """With null where there is no number."""
    return json.dumps(_without_nan(found), indent=1) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(mean: Mapping[str, float]) -> str:
    value, half = mean["value"], mean["half_width"]
    digits = 1 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None and half == half else "")


def _numbers(run: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in run.items() if isinstance(value, float) and math.isfinite(value)}


def _means(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    common = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: vars(mean_over_seeds([run[name] for run in runs])) for name in common}


def _differences(
    runs: Sequence[Mapping[str, float]], models: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in runs[0]:
        if all(name in run for run in (*runs, *models)):
            values = [run[name] - model[name] for run, model in zip(runs, models, strict=True)]
            above = sum(value > 0 for value in values)
            found[name] = vars(mean_over_seeds(values)) | {"above": above, "seeds": len(values)}
    return found
