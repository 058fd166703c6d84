"""Drawing for the pictures of all pages: size, fonts, colours, and curves over the steps of a run.

A picture is the text of an ``<svg>`` element. Text stays text (the page gives it a font); a figure is drawn
at the width of a phone and scales up. Colours of curves are Okabe and Ito's, which the colour-blind can tell
apart, and stand out from a light page and from a dark one; text, axes and grid follow the page (``style.css``
has the variables).
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_fspo.lab.report.history import Array, Series

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7c8493"
YELLOW, SKY = "#c98a00", "#56b4e9"
"""Okabe and Ito's yellow is a little darker here: theirs is lost on white."""
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY)
"""Of lines side by side, the first ones first."""
TEXT, AXIS, GRID, EDGE = "#374151", "#9ca3af", "#e5e7eb", "#111827"
"""Colours on a light page."""
_VARIABLES = {TEXT: "--figure-text", AXIS: "--figure-axis", GRID: "--figure-grid", EDGE: "--figure-edge"}

_STYLE: Any = {  # the type of its keys is another one in each matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron_fspo",  # the same run gives the same file
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), AXIS),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.color": GRID,
    "grid.linewidth": 0.7,
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
            # Text, axes and grid have the colours of the page that has the picture.
            for colour, variable in _VARIABLES.items():
                text = text.replace(colour, f"var({variable}, {colour})")
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
    """Marker of a metric that only some steps log; it is not smoothed."""
    held: bool = False
    """True for a setting, which stays as it is until a step changes it: drawn in steps, and not smoothed."""


def smoothing_window(count: int) -> int:
    """Return the steps that the running mean covers; 1 where there are too few to smooth."""
    return 1 if count <= 10 else max(5, count // 40)


def running_mean(values: Array, window: int) -> Array:
    """Return the centred mean over ``window`` values without the NaN ones; shorter windows at both ends."""
    finite, kernel = np.isfinite(values), np.ones(min(window, len(values)))
    totals = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    counts = np.convolve(finite.astype(np.float64), kernel, mode="same").round()
    means: Array = np.divide(totals, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return means


def thin(values: Array, most: int = 600) -> Array:
    """Return the indices of at most ``most`` values, the extremes of each stretch, so spikes stay."""
    everything = np.arange(len(values))
    if len(values) <= most:
        return everything
    low, high = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    stretches = np.array_split(everything, most // 2)
    picks = [(low[rows].argmin(), high[rows].argmax()) for rows in stretches]
    return np.unique([rows[pick] for rows, both in zip(stretches, picks, strict=True) for pick in both])


def over_steps(axes: Axes, lines: Sequence[Line], y_label: str, x_label: str = "step") -> None:
    """Draw the metrics over the steps of a run, with a legend: every step pale and the running mean bold; a
    setting level, and upright where it changes."""
    for line in lines:
        _curve(axes, line)
    axes.set(xlabel=x_label, ylabel=y_label)
    step_ticks(axes)
    legend(axes)


def step_ticks(axes: Axes) -> None:
    """Mark at most six whole steps along x."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def length_axis(axes: Axes) -> None:
    """Show lengths along x, as powers of 2."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("response length L (tokens)")


def share_axis(axes: Axes, label: str, top: float | None = None) -> None:
    """Show shares from 0 along y, in percent."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylim=(0, top), ylabel=label)


def _curve(axes: Axes, line: Line) -> None:
    steps, values = line.series.steps, line.series.values
    window = 1 if line.marker or line.held else smoothing_window(len(values))
    if window > 1:
        kept = thin(values)
        axes.plot(steps[kept], values[kept], line.style, color=line.colour, lw=0.8, alpha=0.35)
        values = running_mean(values, window)
    # A single step has no line to draw; hundreds of markers would hide it.
    markers = len(values) == 1 if line.held else window == 1 and len(values) <= 60
    if line.held:
        # Thinned, a level stretch would still be level, but a change would move.
        changes = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        kept = np.unique(np.append(changes[thin(values[changes])], len(values) - 1))
    else:
        kept = thin(values)
    axes.plot(
        steps[kept],
        values[kept],
        line.style,
        color=line.colour,
        lw=1.6,
        marker=(line.marker or "o") if markers else "",
        ms=4.5,
        label=line.label or "_",
        drawstyle="steps-post" if line.held else "default",
    )


def legend(axes: Axes, columns: int = 4) -> None:
    """Draw a legend above the axes, if there is anything to name."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2)
