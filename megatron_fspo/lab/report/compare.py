"""Several runs on one page: the same pictures for all of them, and the settings in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.tables import number, with_interval
from megatron_fspo.lab.report import pictures
from megatron_fspo.lab.report.charts import PLAIN, STEP, Line, Spec, axis, chart
from megatron_fspo.lab.report.figures import ABSENT, TAIL, WINDOW, RunData, in_words, machines
from megatron_fspo.lab.report.history import clip_rates, overall_rates
from megatron_fspo.lab.report.html import render_page
from megatron_fspo.lab.report.page import smoothing, with_ends
from megatron_fspo.lab.report.pictures import LengthCurve, choose_style
from megatron_fspo.objective import FSPOBand

_MATCHED = 0.02
"""Shares outside further apart than this are not matched."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run of several."""

    label: str
    """A letter and the name of the loss, which is short enough for a legend."""
    name: str
    """Name of its folder, with as much of the path as tells it from the others."""
    data: RunData


def write_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Draw one page for at least two runs, and return its path. ``out`` is a folder for ``index.html``, or a
    file that ends in ``.html``; by default a folder beside the first run, with its name and ``.compare``.

    Raises:
        InputError: fewer than two runs; one is given twice; or a folder holds no run, or one without a step.
    """
    if len(folders) < 2:
        raise InputError("report --compare: name two runs or more")
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise InputError(f"report --compare: {folder} is there twice")
    runs = []
    for position, (folder, name) in enumerate(zip(folders, names(paths), strict=True)):
        data = RunData(folder)
        if not data.steps:
            raise InputError(f"{folder}: has made no step; there is nothing to compare yet")
        runs.append(ComparedRun(label=f"{_letters(position)} {data.config.loss.name}", name=name, data=data))
    out = out or paths[0].parent / f"{paths[0].name}.compare"
    page = out if out.suffix == ".html" else out / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_render(runs), encoding="utf-8")
    return page


def names(paths: Sequence[Path]) -> list[str]:
    """Return the end of each path, as long as it must be for no two to be equal. The paths must differ."""
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return [str(Path(*path.parts[-length:])) for path in paths]


def differences(configs: Sequence[Any]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each run) of the settings that are not equal in all, those of the folder apart; a
    key that a run does not have is a dash."""
    flat = [
        {
            f"{section}.{key}": ABSENT if value is None else in_words(value)
            for section, keys in config.model_dump(mode="json").items()
            for key, value in keys.items()
        }
        for config in configs
    ]
    every = dict.fromkeys(key for config in flat for key in config if key not in ("run.name", "run.folder"))
    rows = [(key, [config.get(key, ABSENT) for config in flat]) for key in every]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def figures(data: RunData) -> dict[str, str]:
    """Return the numbers of a run by name, of its last steps by default; the same names for every run."""
    lre, measured, band = data.lre, data.exponent, data.band()
    seconds = data.history.series("timing_s/step")
    pooled = f"{with_interval(lre.mean, *lre.mean_interval, '.3f')}, by chance {lre.null_mean:.3f}"
    exponent = ABSENT
    if not isinstance(measured, str):
        exponent = with_interval(measured.value, *measured.interval, ".2f")
    gained, change = ABSENT, data.change
    if change is not None and change.interval is not None:
        gained = with_interval(change.after - change.before, *change.interval, ".3f")
    last = {
        name: number(data.history.series(metric).last(WINDOW), form, ABSENT)
        for name, metric, form in (
            ("Reward", "critic/rewards/mean", ".3f"),
            ("Response length", "response_length/mean", ",.1f"),
            ("Outside the band", "fspo/out_of_band", ".1%"),
            ("Clip rate", "actor/pg_clipfrac", ".1%"),
            ("Effective sample size", "fspo/ess", ".2f"),
        )
    }
    return {
        "Steps": f"{len(data.steps):,} of {data.config.run.steps:,}",
        "Evaluation, first": _evaluated(data, 0),
        "Evaluation, last": _evaluated(data, -1),
        "Evaluation, gained": gained,
        **last,
        "LRE pooled": pooled if math.isfinite(lre.mean) else ABSENT,
        "LRE pooled, clipped": number(data.signed["length"].mean, ".3f", ABSENT),
        "Exponent of S": exponent,
        "… of FSPO’s band": f"{band.exponent:.3g}" if isinstance(band, FSPOBand) else ABSENT,
        "Seconds of a step": f"{seconds.total() / len(seconds.steps):.3g}" if seconds else ABSENT,
        "Hardware": machines(data.jobs).get("Hardware", ABSENT),
    }


def sentences(curves: Sequence[LengthCurve]) -> Iterator[str]:
    """Yield the first picture in words."""
    banded = [curve for curve in curves if len(curve.bins) > 1 and curve.bins[0].out_of_band > 0]
    ratios = [(curve.bins[-1].out_of_band / curve.bins[0].out_of_band, curve.label) for curve in banded]
    if banded:
        often = [f"{ratio:.1f} × as often as the shortest in {label}" for ratio, label in ratios[:1]]
        often += [f"{ratio:.1f} × in {label}" for ratio, label in ratios[1:]]
        yield f"The longest responses are outside the band {', '.join(often)}."
    shares = [curve.overall for curve in curves if math.isfinite(curve.overall)]
    if shares and max(shares) - min(shares) > _MATCHED:
        listed = ", ".join(f"{curve.label} {number(curve.overall, '.1%', ABSENT)}" for curve in curves)
        yield f"The shares outside over all lengths are not matched: {listed}."


def _render(runs: Sequence[ComparedRun]) -> str:
    every = [figures(run.data) for run in runs]
    curves = [_by_length(run) for run in runs]
    rows = [(name, [figures[name] for figures in every]) for name in every[0]]
    return render_page(
        Path(__file__).with_name("compare.html"),
        dict(_pictures(runs, curves)),
        runs=runs,
        sentences=list(sentences(curves)),
        colours=[choose_style(position)["colour"] for position in range(len(runs))],
        rows=[(name, values) for name, values in rows if set(values) != {ABSENT}],
        differences=differences([run.data.config for run in runs]),
        smoothing=smoothing(max(len(run.data.steps) for run in runs)),
    )


def _pictures(runs: Sequence[ComparedRun], lengths: Sequence[LengthCurve]) -> Iterator[tuple[str, Spec]]:
    styles = [{"label": run.label, **choose_style(position)} for position, run in enumerate(runs)]
    styled = list(zip((run.data.history for run in runs), styles, strict=True))
    rewards = [with_ends(history, "critic/rewards/mean", **style) for history, style in styled]
    yield "reward", chart(rewards, STEP, axis("reward"))
    for name, metric, unit in (
        ("response_length", "response_length/mean", "L (tokens), mean"),
        ("outside", "fspo/out_of_band", "share"),
        ("ess", "fspo/ess", "share"),
    ):
        found = [(history.series(metric), style) for history, style in styled]
        if lines := [Line.over_steps(series, **style) for series, style in found if series]:
            yield name, chart(lines, STEP, axis(unit, share=unit == "share"))
    named = [(history, history.evaluation(), style) for history, style in styled]
    if lines := [with_ends(one, name, kind=PLAIN, **style) for one, name, style in named if name]:
        yield "evaluation", chart(lines, STEP, axis("mean reward"))
    if any(curve.bins for curve in lengths):
        yield "by_length", pictures.by_length(lengths)
        yield "relative", pictures.by_length(lengths, relative=True)
    if any(math.isfinite(run.data.lre.mean) for run in runs):
        yield "length_error", pictures.length_errors([(run.label, run.data.lre) for run in runs])


def _by_length(run: ComparedRun) -> LengthCurve:
    tail = run.data.records.tail(TAIL, WINDOW)
    return LengthCurve(
        label=run.label,
        bins=clip_rates(tail) if len(tail) else [],
        overall=overall_rates(tail).out_of_band if len(tail) else math.nan,
    )


def _evaluated(data: RunData, at: int) -> str:
    """Return the first evaluation (0) or the last (-1), with its interval if the run has one."""
    if not (name := data.history.evaluation()):
        return ABSENT
    series = (data.history.series(f"{name}{end}") for end in ("", "/low", "/high"))
    value, low, high = (float(line.values[at]) if len(line) else math.nan for line in series)
    return with_interval(value, low, high, ".3f", ABSENT)


def _letters(position: int) -> str:
    """Return A … Z, AA, AB …"""
    high, low = divmod(position, 26)
    return (_letters(high - 1) if high else "") + chr(ord("A") + low)
