"""The pictures of the pages of one run and of several. No text of the user's gets into a picture.

With several runs each has one colour, the same in every picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from megatron_fspo.evaluation.intervals import Estimate, wilson_interval
from megatron_fspo.lab.report.drawing import (
    BLUE,
    COLOURS,
    EDGE,
    GREEN,
    ORANGE,
    Line,
    legend,
    length_axis,
    over_steps,
    picture,
    share_axis,
    step_ticks,
)
from megatron_fspo.lab.report.history import Array, BinRates, Records, Series
from megatron_fspo.objective import ClipBand, LengthReweightingError
from megatron_fspo.objective.calibration import Exponent

_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX"


@picture(4.6, 2.9)
def curves(figure: Figure, lines: Sequence[Line], y_label: str, *, share: bool = False) -> None:
    """Draw the metrics over the steps; a share from 0 and in percent."""
    axes = figure.subplots()
    over_steps(axes, lines, y_label)
    if share:
        share_axis(axes, y_label)


@picture(4.6, 2.9)
def response_length(figure: Figure, mean: Series, low: Series, high: Series, cut: Series) -> None:
    """Draw the mean, the band from the shortest to the longest, and below it the share cut at the limit."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    # At most 300 steps: the extremes of each stretch.
    count = len(low)
    stretches = np.array_split(np.arange(count), min(300, count)) if count else []
    steps = [low.steps[rows].mean() for rows in stretches]
    bottom = [low.values[rows].min() for rows in stretches]
    top = [high.values[rows].max() for rows in stretches]
    upper.fill_between(steps, bottom, top, color=BLUE, alpha=0.12, lw=0, label="shortest to longest")
    over_steps(upper, [Line(series=mean, label="mean", colour=BLUE)], "L (tokens)", x_label="")
    over_steps(lower, [Line(series=cut, label="", colour=ORANGE)], "cut")
    share_axis(lower, "cut")
    lower.yaxis.set_major_locator(MaxNLocator(3))


@picture(4.6, 2.9)
def rates_by(figure: Figure, bins: Sequence[BinRates], overall: BinRates, x_label: str) -> None:
    """Draw the clip rates per bin with 95% intervals, and of all records as lines."""
    axes = figure.subplots()
    for shift, share, of, colour, marker, label in (
        (-0.15, "out_of_band", "records", BLUE, "o", "outside"),
        (0.0, "clipped_falling", "falling", ORANGE, "s", "clipped, of those with A < 0"),
        (0.15, "clipped_rising", "rising", GREEN, "^", "clipped, of those with A > 0"),
    ):
        if kept := [(at + shift, bin) for at, bin in enumerate(bins) if getattr(bin, of)]:
            y, reach = _with_reach([wilson_interval(getattr(b, share), getattr(b, of)) for _, b in kept])
            x = [at for at, _ in kept]
            axes.errorbar(x, y, yerr=reach, fmt=marker, ms=4.5, lw=1.2, color=colour, label=label)
            axes.axhline(getattr(overall, share), color=colour, ls="--", lw=1)
    labels = [f"{b.low}" if b.low == b.high else f"{b.low}–{b.high}" for b in bins]
    wide = max(map(len, labels)) > 5
    axes.set_xticks(range(len(bins)), labels, rotation=30 if wide else 0, ha="right" if wide else "center")
    axes.grid(visible=False, axis="x")
    axes.set(xlim=(-0.6, len(bins) - 0.4), xlabel=x_label)
    share_axis(axes, "share of sequences")
    legend(axes)


def _with_reach(estimates: Sequence[Estimate]) -> tuple[Array, Array]:
    """Return the values [n] and the distances [2, n] of the ends of their intervals."""
    values = np.array([estimate.value for estimate in estimates])
    return values, np.abs(np.array([(estimate.low, estimate.high) for estimate in estimates]).T - values)


@picture(4.6, 2.9)
def length_error(figure: Figure, lines: Sequence[Line], pooled: LengthReweightingError) -> None:
    """Draw LRE per step against its null floor; beside it that over all records, with its bootstrap interval
    and the null floor of so many."""
    if not np.isfinite(pooled.mean):
        over_steps(figure.subplots(), lines, "LRE")
        figure.axes[0].set_ylim(bottom=0)
        return
    by_step, whole = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    over_steps(by_step, lines, "LRE")
    _pooled_error(whole, 0.0, pooled, GREEN)
    whole.set_xticks([0.0], ["pooled"])
    whole.set_xlim(-1, 1)
    whole.grid(visible=False, axis="x")
    by_step.set_ylim(bottom=0)


def _pooled_error(axes: Axes, at: float, pooled: LengthReweightingError, colour: str) -> None:
    """Draw a pooled LRE with its interval at this x, and its own null floor as a dashed line across it."""
    low, high = pooled.mean_interval
    reach = [[max(pooled.mean - low, 0.0)], [max(high - pooled.mean, 0.0)]]
    axes.errorbar(
        [at], [pooled.mean], yerr=reach if np.isfinite(reach).all() else None, fmt="o", ms=5, color=colour
    )
    axes.plot([at - 0.4, at + 0.4], [pooled.null_mean] * 2, "--", color=EDGE, lw=1.2)


def beyond(records: Records, band: ClipBand | None) -> Array:
    """Return [N] bool: the records that lie outside the scatter picture."""
    return np.abs(records.log_ratio_sum) > _scatter_limit(records, band)


@picture(4.6, 2.9)
def scatter(figure: Figure, records: Records, band: ClipBand | None) -> None:
    """Draw S against √L with the band; what lies outside the picture is a triangle at its edge."""
    axes = figure.subplots()
    limit = _scatter_limit(records, band)
    for rows, label, colour in (
        (~records.out_of_band & ~records.clipped, "inside", BLUE),
        (records.out_of_band & ~records.clipped, "outside, kept", GREEN),
        (records.clipped, "clipped", ORANGE),
    ):
        x, y = np.sqrt(records.length[rows]), records.log_ratio_sum[rows]
        axes.scatter([], [], s=16, color=colour, label=f"{label} {len(x):,}")
        for here, marker, size in ((np.abs(y) <= limit, "o", 9), (y > limit, "^", 16), (y < -limit, "v", 16)):
            height = y[here].clip(-0.97 * limit, 0.97 * limit) if marker != "o" else y[here]
            # Pixels: thousands of dots as svg would be most of the file.
            axes.scatter(
                x[here], height, s=size, marker=marker, color=colour, alpha=0.6, lw=0, rasterized=True
            )
    longest = float(records.length.max())
    if band is not None:
        grid = torch.linspace(0.0, 1.05, 200).square() * longest
        for edge in band.bounds(grid):
            axes.plot(grid.sqrt().numpy(), edge.numpy(), color=EDGE, lw=1.2)
    ticks = [tick for tick in MaxNLocator(5, integer=True).tick_values(0, longest) if tick <= 1.1 * longest]
    axes.set_xticks(np.sqrt(ticks), [f"{tick:.0f}" for tick in ticks])
    axes.set(xlim=(0, 1.05 * longest**0.5), xlabel="response length L (tokens, spaced as √L)")
    axes.set(ylim=(-limit, limit), ylabel="S (nats)")
    legend(axes)


def _scatter_limit(records: Records, band: ClipBand | None) -> float:
    """Return the largest |S| in the picture: 95% of the records, and the whole band with a margin."""
    if not len(records):
        return 1.0
    robust = float(np.quantile(np.abs(records.log_ratio_sum), 0.95))
    if band is None:
        return robust or 1.0
    edges = torch.cat(band.bounds(torch.tensor([1.0, float(records.length.max())])))
    return max(1.4 * edges.abs().max().item(), robust)


@picture(3.0, 2.1)
def small(figure: Figure, lines: Sequence[Line], y_label: str) -> None:
    """Draw one of the small pictures; a log axis where spikes would flatten the rest."""
    axes = figure.subplots()
    values = np.concatenate([line.series.values for line in lines])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 30 * np.median(values):
        axes.set_yscale("log")
    over_steps(axes, lines, y_label)


@picture(3.0, 2.1)
def exponent(figure: Figure, lines: Sequence[Line], measured: Exponent | None) -> None:
    """Draw the exponent of S: fitted step by step, that of the band, and over all steps with its interval."""
    axes = figure.subplots()
    if measured is not None:
        axes.axhspan(*measured.interval, color=GREEN, alpha=0.25, lw=0)
        axes.axhline(measured.value, color=GREEN, lw=1.4)
    over_steps(axes, lines, "a")
    # A step of few lengths fits anything.
    axes.set_ylim(-0.25, 1.5)


@picture(3.0, 2.1)
def expert_load(figure: Figure, load: Array) -> None:
    """Draw tokens of each expert [layers, experts] over the even load of its layer."""
    axes = figure.subplots()
    even = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
    # Pixels: a large model has thousands of experts.
    cells = axes.pcolormesh(even, cmap="cividis", vmin=0.0, rasterized=True)
    figure.colorbar(cells, label="times the even load")
    for axis, count in ((axes.xaxis, load.shape[1]), (axes.yaxis, load.shape[0])):
        numbers = np.arange(0, count, math.ceil(count / 8))
        axis.set_ticks(numbers + 0.5, [str(number) for number in numbers])
    axes.grid(visible=False)
    axes.set(xlabel="expert", ylabel="layer")


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Rates of one run by length."""

    label: str
    bins: Sequence[BinRates]
    overall: float
    """Share outside the band over all lengths."""


def choose_style(position: int) -> tuple[str, str, str]:
    """Return the colour, style of line and marker of the run at this position."""
    style = _STYLES[position // len(COLOURS) % len(_STYLES)]
    return COLOURS[position % len(COLOURS)], style, _MARKERS[position % len(_MARKERS)]


@picture(4.6, 2.9)
def evaluations(figure: Figure, runs: Sequence[tuple[int, str, Sequence[Series]]]) -> None:
    """Draw accuracy over the steps, with intervals where there are any. Of each run: its position among those
    that are compared, its label, and accuracy with the ends of its interval."""
    axes = figure.subplots()
    span = max(series[0].steps.max() - series[0].steps.min() for _, _, series in runs) or 1
    for position, label, (accuracy, low, high) in runs:
        colour, style, marker = choose_style(position)
        values = accuracy.values
        at = accuracy.steps + 0.008 * span * position  # none hides another
        if low and high and len(low) == len(high) == len(values):
            reach = np.stack([values - low.values, high.values - values]).clip(min=0.0)
            axes.errorbar(at, values, yerr=reach, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
        axes.plot(at, values, style, color=colour, marker=marker, ms=4.5, lw=1.4, label=label)
    axes.set(xlabel="step", ylabel="mean reward")
    step_ticks(axes)
    legend(axes)


@picture(4.6, 2.9)
def by_length(figure: Figure, runs: Sequence[LengthCurve], *, relative: bool = False) -> None:
    """Share outside the band by length, with 95% intervals; relative: over the run's own share, which is one
    scale for runs that clip unequally often."""
    axes = figure.subplots()
    if relative:
        axes.axhline(1.0, color=EDGE, lw=1, ls="--")
    for position, curve in enumerate(runs):
        scale = curve.overall if relative else 1.0
        if not curve.bins or not scale > 0:
            continue
        colour, style, marker = choose_style(position)
        lengths = [(bin.low * bin.high) ** 0.5 for bin in curve.bins]
        rates, reach = _with_reach([wilson_interval(bin.out_of_band, bin.records) for bin in curve.bins])
        look: Any = {"ls": style, "marker": marker, "ms": 4.5, "lw": 1.4, "elinewidth": 1}
        axes.errorbar(lengths, rates / scale, yerr=reach / scale, color=colour, label=curve.label, **look)
    length_axis(axes)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if relative:
        axes.set(ylim=(0, None), ylabel="outside, over the run's own rate")
    else:
        share_axis(axes, "outside the band")
    legend(axes)


@picture(4.6, 2.9)
def length_errors(figure: Figure, errors: Sequence[tuple[str, LengthReweightingError]]) -> None:
    """Draw the pooled LRE of every run, by its label, with its interval, on its own null floor."""
    axes = figure.subplots()
    for position, (_, error) in enumerate(errors):
        if np.isfinite(error.mean):
            _pooled_error(axes, float(position), error, choose_style(position)[0])
    axes.set_xticks(range(len(errors)), [label for label, _ in errors])
    axes.set(xlim=(-0.7, len(errors) - 0.3), ylim=(0, None), ylabel="pooled LRE")
    axes.grid(visible=False, axis="x")
