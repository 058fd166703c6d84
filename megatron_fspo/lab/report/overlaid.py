"""Pictures with several runs in each: one colour for each run, the same in every picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from megatron_fspo.lab.report.drawing import (
    BLUE,
    EDGE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    Line,
    legend,
    over_steps,
    picture,
)
from megatron_fspo.lab.report.history import BinRates, Series, wilson_interval
from megatron_fspo.lab.report.pictures import pooled_error
from megatron_fspo.objective import LengthReweightingError

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY)
_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric of one run."""

    label: str
    series: Series
    low: Series | None = None
    """Ends of its interval."""
    high: Series | None = None


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Rates of one run by length."""

    label: str
    bins: Sequence[BinRates]
    overall: float
    """Share outside the band over all lengths."""


@dataclass(frozen=True, kw_only=True)
class PooledError:
    """The pooled LRE of one run."""

    label: str
    error: LengthReweightingError


def style_of(position: int) -> tuple[str, str, str]:
    """Colour, style of line and marker of the run at this place."""
    style = _STYLES[position // len(_COLOURS) % len(_STYLES)]
    return _COLOURS[position % len(_COLOURS)], style, _MARKERS[position % len(_MARKERS)]


@picture(4.6, 2.9)
def over_all_steps(figure: Figure, curves: Sequence[Curve], y_label: str, *, share: bool) -> None:
    """A metric of every run over its steps; a share from 0 and in percent."""
    axes = figure.subplots()
    lines = []
    for position, curve in enumerate(curves):
        colour, style, _ = style_of(position)
        if curve.series:
            lines.append(Line(series=curve.series, label=curve.label, colour=colour, style=style))
    over_steps(axes, lines, y_label)
    if share:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@picture(4.6, 2.9)
def evaluations(figure: Figure, curves: Sequence[tuple[int, Curve]]) -> None:
    """(place of the run, its accuracy) with intervals where there are any."""
    axes = figure.subplots()
    span = max((curve.series.steps.max() - curve.series.steps.min() for _, curve in curves), default=0) or 1
    for position, curve in curves:
        colour, style, marker = style_of(position)
        at, values = curve.series.steps + 0.008 * span * position, curve.series.values  # none hides another
        if curve.low and curve.high and len(curve.low.values) == len(curve.high.values) == len(values):
            reach = np.stack([values - curve.low.values, curve.high.values - values]).clip(min=0.0)
            axes.errorbar(at, values, yerr=reach, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
        axes.plot(at, values, style, color=colour, marker=marker, ms=4.5, lw=1.4, label=curve.label)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    legend(axes)


@picture(4.6, 2.9)
def by_length(figure: Figure, curves: Sequence[LengthCurve]) -> None:
    """Share outside the band by length, with 95% intervals."""
    axes = figure.subplots()
    _by_length(axes, curves, relative=False)
    axes.set_ylabel("outside the band")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@picture(4.6, 2.9)
def relative_by_length(figure: Figure, curves: Sequence[LengthCurve]) -> None:
    """The same over the run's own share of all lengths: runs that clip unequally often, on one scale."""
    axes = figure.subplots()
    axes.axhline(1.0, color=EDGE, lw=1, ls="--")
    _by_length(axes, curves, relative=True)
    axes.set_ylabel("outside, over the run's own rate")


@picture(4.6, 2.9)
def length_errors(figure: Figure, errors: Sequence[PooledError]) -> None:
    """The pooled LRE of every run with its interval, on its own null floor."""
    axes = figure.subplots()
    for position, one in enumerate(errors):
        if np.isfinite(one.error.mean):
            pooled_error(axes, float(position), one.error, style_of(position)[0])
    axes.set_xticks(range(len(errors)), [one.label for one in errors])
    axes.set_xlim(-0.7, len(errors) - 0.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("pooled LRE")
    axes.grid(visible=False, axis="x")


def _by_length(axes: Axes, curves: Sequence[LengthCurve], *, relative: bool) -> None:
    for position, curve in enumerate(curves):
        scale = curve.overall if relative else 1.0
        if not curve.bins or not scale > 0:
            continue
        colour, style, marker = style_of(position)
        lengths = [(one.low * one.high) ** 0.5 for one in curve.bins]
        rates = np.array([one.out_of_band for one in curve.bins])
        ends = np.array([wilson_interval(one.out_of_band, one.records) for one in curve.bins]).T
        axes.errorbar(
            lengths,
            rates / scale,
            yerr=np.abs(ends - rates) / scale,
            color=colour,
            ls=style,
            marker=marker,
            ms=4.5,
            lw=1.4,
            elinewidth=1,
            label=curve.label,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("response length L (tokens)")
    legend(axes)
