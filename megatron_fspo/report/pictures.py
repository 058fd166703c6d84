"""The pictures of the report, each as the text of an ``<svg>`` element.

Text stays text (the page gives it a font); a figure is drawn at the width of a phone and scales up. Colours
are Okabe and Ito's, which the colour-blind can tell apart. No text of the user's gets into a picture.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_fspo.objective import ClipBand, LengthReweightingError
from megatron_fspo.report.history import Array, BinRates, Records, Series, wilson_interval

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#6b7280"

_STYLE: Any = {  # the type of its keys is another one in each matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron_fspo",  # the same run gives the same file
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#9ca3af",
    "ytick.color": "#9ca3af",
    "xtick.labelcolor": "#374151",
    "ytick.labelcolor": "#374151",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
}
# Without these there would be a block of metadata, with today's date in it.
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}

P = ParamSpec("P")


def picture(
    width: float, height: float
) -> Callable[[Callable[Concatenate[Figure, P], None]], Callable[P, str]]:
    """Give the function an empty figure of this size (inches) and turn it into the text of an svg."""

    def wrap(paint: Callable[Concatenate[Figure, P], None]) -> Callable[P, str]:
        @functools.wraps(paint)
        def draw(*args: P.args, **kwargs: P.kwargs) -> str:
            file = io.StringIO()
            with rc_context(_STYLE):
                figure = Figure(figsize=(width, height), layout="constrained")
                paint(figure, *args, **kwargs)
                figure.savefig(file, format="svg", dpi=200, transparent=True, metadata=_NO_METADATA)
            text = file.getvalue()
            return text[text.index("<svg") :]

        return draw

    return wrap


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric in a picture over steps."""

    series: Series
    label: str
    colour: str
    style: str = "-"
    marker: str = ""
    """For metrics that only some steps log; they are not smoothed."""


@picture(4.6, 2.9)
def reward(figure: Figure, lines: Sequence[Line]) -> None:
    _over_steps(figure.subplots(), lines, "reward")


@picture(4.6, 2.9)
def response_length(figure: Figure, mean: Series, low: Series, high: Series, cut: Series) -> None:
    """Mean with the band from the shortest to the longest, and below it the share cut at the limit."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    steps, bottom, top = _envelope(low, high)
    upper.fill_between(steps, bottom, top, color=BLUE, alpha=0.12, lw=0, label="shortest to longest")
    _over_steps(upper, [Line(series=mean, label="mean", colour=BLUE)], "L (tokens)", x_label="")
    _over_steps(lower, [Line(series=cut, label="", colour=ORANGE)], "cut")
    lower.yaxis.set_major_formatter(PercentFormatter(1.0))
    lower.yaxis.set_major_locator(MaxNLocator(3))
    lower.set_ylim(bottom=0)


@picture(4.6, 2.9)
def clip_rate(figure: Figure, lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    _over_steps(axes, lines, "share")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@picture(4.6, 2.9)
def rates_by_length(figure: Figure, bins: Sequence[BinRates], overall: BinRates) -> None:
    """Both clip rates per length bin with 95% intervals, and over all lengths as lines."""
    axes = figure.subplots()
    _rates(axes, -0.1, [(b.out_of_band, b.records) for b in bins], overall.out_of_band, BLUE, "o", "outside")
    label = "clipped, of those with A ≠ 0"
    _rates(axes, 0.1, [(b.clipped, b.judged) for b in bins], overall.clipped, ORANGE, "s", label)
    labels = [f"{b.low}" if b.low == b.high else f"{b.low}–{b.high}" for b in bins]
    wide = max(map(len, labels)) > 5
    axes.set_xticks(range(len(bins)), labels, rotation=30 if wide else 0, ha="right" if wide else "center")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.6, len(bins) - 0.4)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("response length L (tokens)")
    axes.set_ylabel("share of sequences")
    legend(axes)


@picture(4.6, 2.9)
def length_error(figure: Figure, lines: Sequence[Line], pooled: LengthReweightingError) -> None:
    """LRE per step against its null floor, and over all records with its bootstrap interval."""
    axes = figure.subplots()
    if np.isfinite(pooled.mean_interval).all():
        axes.axhspan(*pooled.mean_interval, color=GREEN, alpha=0.25, lw=0)
        axes.axhline(pooled.mean, color=GREEN, lw=1.4, label="pooled")
    _over_steps(axes, lines, "LRE")
    axes.set_ylim(bottom=0)


def beyond(records: Records, band: ClipBand | None) -> Array:
    """bool [N]: the records that lie outside the scatter picture."""
    return np.abs(records.log_ratio_sum) > _scatter_limit(records, band)


@picture(4.6, 2.9)
def scatter(figure: Figure, records: Records, band: ClipBand | None) -> None:
    """S against √L with the band; what lies outside the picture is a triangle at its edge."""
    axes = figure.subplots()
    limit = _scatter_limit(records, band)
    for rows, label, colour in (
        (~records.out_of_band & ~records.clipped, "inside", BLUE),
        (records.out_of_band & ~records.clipped, "outside, kept", GREEN),
        (records.clipped, "clipped", ORANGE),
    ):
        x, y = np.sqrt(records.length[rows]), records.log_ratio_sum[rows]
        axes.scatter([], [], s=16, color=colour, label=f"{label} {len(x):,}")
        for place, marker, size in (
            (np.abs(y) <= limit, "o", 9),
            (y > limit, "^", 16),
            (y < -limit, "v", 16),
        ):
            height = y[place].clip(-0.97 * limit, 0.97 * limit) if marker != "o" else y[place]
            # Pixels: thousands of dots as svg would be most of the file.
            axes.scatter(
                x[place], height, s=size, marker=marker, color=colour, alpha=0.6, lw=0, rasterized=True
            )
    longest = float(records.length.max())
    if band is not None:
        grid = torch.linspace(0.0, 1.05, 200).square() * longest
        for edge in band.bounds(grid):
            axes.plot(grid.sqrt().numpy(), edge.numpy(), color="#111827", lw=1.2)
    ticks = [tick for tick in MaxNLocator(5, integer=True).tick_values(0, longest) if tick <= 1.1 * longest]
    axes.set_xticks(np.sqrt(ticks), [f"{tick:.0f}" for tick in ticks])
    axes.set_xlim(0, 1.05 * longest**0.5)
    axes.set_ylim(-limit, limit)
    axes.set_xlabel("response length L (tokens, spaced as √L)")
    axes.set_ylabel("S (nats)")
    legend(axes)


def _scatter_limit(records: Records, band: ClipBand | None) -> float:
    """Largest |S| in the picture: 95% of the records, and the whole band with a margin."""
    if not len(records):
        return 1.0
    robust = float(np.quantile(np.abs(records.log_ratio_sum), 0.95))
    if band is None:
        return robust or 1.0
    edges = torch.cat(band.bounds(torch.tensor([1.0, float(records.length.max())])))
    return max(1.4 * edges.abs().max().item(), robust)


def _rates(
    axes: Axes,
    shift: float,
    rates: Sequence[tuple[float, int]],
    overall: float,
    colour: str,
    marker: str,
    label: str,
) -> None:
    """A (rate, count) per bin with its interval, and the overall rate; nothing where nothing was counted."""
    kept = [(at, rate, wilson_interval(rate, count)) for at, (rate, count) in enumerate(rates) if count]
    if not kept:
        return
    x, y = np.array([at + shift for at, *_ in kept]), np.array([rate for _, rate, _ in kept])
    reach = np.abs(np.array([interval for *_, interval in kept]).T - y)
    axes.errorbar(x, y, yerr=reach, fmt=marker, ms=4.5, lw=1.2, color=colour, label=label)
    axes.axhline(overall, color=colour, ls="--", lw=1)


@picture(3.0, 2.1)
def small(figure: Figure, lines: Sequence[Line], y_label: str) -> None:
    """One of the small pictures; a log axis where spikes would flatten the rest."""
    axes = figure.subplots()
    values = np.concatenate([line.series.values for line in lines])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 30 * np.median(values):
        axes.set_yscale("log")
    _over_steps(axes, lines, y_label)


def smoothing_window(count: int) -> int:
    """Steps that the running mean covers; 1 where there are too few to smooth."""
    return 1 if count <= 10 else max(5, count // 40)


def running_mean(values: Array, window: int) -> Array:
    """Centred mean over ``window`` values without the NaN ones; shorter windows at both ends."""
    finite, kernel = np.isfinite(values), np.ones(min(window, len(values)))
    totals = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    counts = np.convolve(finite.astype(np.float64), kernel, mode="same").round()
    return np.divide(totals, counts, out=np.full(len(values), np.nan), where=counts > 0)


def thin(values: Array, most: int = 600) -> Array:
    """Indices of at most ``most`` values: the smallest and the largest of each stretch, so spikes stay."""
    everything = np.arange(len(values))
    if len(values) <= most:
        return everything
    low, high = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    stretches = np.array_split(everything, most // 2)
    return np.unique([part[pick] for part in stretches for pick in (low[part].argmin(), high[part].argmax())])


def _over_steps(axes: Axes, lines: Sequence[Line], y_label: str, x_label: str = "step") -> None:
    for line in lines:
        _curve(axes, line)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    legend(axes)


def _curve(axes: Axes, line: Line) -> None:
    """Every step pale and the running mean bold."""
    steps, values = line.series.steps, line.series.values
    window = 1 if line.marker else smoothing_window(len(values))
    if window > 1:
        kept = thin(values)
        axes.plot(steps[kept], values[kept], line.style, color=line.colour, lw=0.8, alpha=0.35)
        values = running_mean(values, window)
    # A single step has no line to draw; hundreds of markers would hide it.
    marker = "" if window > 1 or len(values) > 60 else line.marker or "o"
    kept = thin(values)
    axes.plot(
        steps[kept],
        values[kept],
        line.style,
        color=line.colour,
        lw=1.6,
        marker=marker,
        ms=4.5,
        label=line.label or "_",
    )


def _envelope(low: Series, high: Series) -> tuple[Array, Array, Array]:
    """Steps, lower and upper edge, at most 300 of them: the extremes of each stretch."""
    stretches = np.array_split(np.arange(len(low.steps)), min(300, max(1, len(low.steps))))
    stretches = [part for part in stretches if len(part)]
    return (
        np.array([low.steps[part].mean() for part in stretches]),
        np.array([low.values[part].min() for part in stretches]),
        np.array([high.values[part].max() for part in stretches]),
    )


def legend(axes: Axes, columns: int = 4) -> None:
    """Above the axes, if there is anything to name."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2)
