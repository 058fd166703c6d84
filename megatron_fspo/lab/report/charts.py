"""Figures of all pages, as specifications in Vega-Lite: the browser draws them, and they answer the mouse.

Colours of curves are Okabe and Ito's, which the colour-blind can tell apart, and stand out from a light page
and from a dark one; text, axes and grid follow the page (``style.css`` has the variables).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.lab.report.history import Array, Series

Spec = dict[str, Any]
"""A specification in Vega-Lite, or a part of one."""
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7c8493"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#c98a00", "#56b4e9", GREY)
"""Of lines side by side, in this order; Okabe and Ito's yellow is darker here, as theirs is lost on white."""
TEXT, AXIS = "var(--figure-text, #374151)", "var(--figure-axis, #9ca3af)"
GRID, EDGE = "var(--figure-grid, #e5e7eb)", "var(--figure-edge, #111827)"
STEP: Spec = {"title": "step", "axis": {"tickMinStep": 1, "format": ",d"}}
LENGTH: Spec = {"title": "response length L (tokens)", "scale": {"type": "log", "base": 2, "nice": False}}
SMOOTHED, PLAIN, HELD = range(3)
_DASHES = [5, 3]
_DOT = {"type": "point", "filled": True, "opacity": 1}
_SHOWN: Spec = {"filter": {"param": "shown", "empty": False}}
_MOST = 300
"""Points of a line: of a longer one each is the mean of a stretch, within its extremes."""
_LOG = "logarithmic == 'log'"
_NUMBER = "format(datum.value, datum.value == 0 || abs(datum.value) >= 1e-3 ? ',.4~r' : '.1~e')"
_AXIS = {"domainColor": AXIS, "tickColor": AXIS, "gridColor": GRID, "labelColor": TEXT, "titleColor": TEXT}
_LEGEND: Spec = {
    "orient": "top",
    "direction": "horizontal",
    "title": None,
    "labelColor": TEXT,
    "titleColor": TEXT,
}
_CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_AXIS,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelOverlap": True,
    },
    "legend": {
        **_LEGEND,
        "symbolOpacity": 1,
        "labelFontSize": 11,
        "labelLimit": 330,
        "symbolStrokeWidth": 2.5,
    },
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points of one label and colour."""

    label: str
    colour: str
    x: Array
    """Numbers, or the names of bins."""
    y: Array
    low: Array | None = None
    """Lower ends of the intervals of ``y``, if it has any; NaN where one has none."""
    high: Array | None = None
    dashed: bool = False
    kind: int = SMOOTHED
    """``SMOOTHED`` as the page says; ``PLAIN``; or ``HELD``, a setting, which stays as it is until a step
    changes it."""

    @classmethod
    def over_steps(cls, series: Series, *ends: Series, **style: Any) -> Line:
        """Return a metric over steps, with the two ends of its interval if every value has them."""
        whole = len(ends) == 2 and all(np.array_equal(end.steps, series.steps) for end in ends)
        low, high = (end.values for end in ends) if whole else (None, None)
        return cls(x=series.steps, y=series.values, low=low, high=high, **style)

    def rows(self, most: int = _MOST) -> Iterator[Spec]:
        """Yield at most so many rows: label, x and y, and low and high where there are any."""
        count, low, high = len(self.x), self.low, self.high
        if count > most and self.kind != HELD and low is None:
            low = high = self.y
        for rows in np.array_split(np.arange(count), min(most, count)) if count else []:
            y = self.y[rows[-1]] if self.kind == HELD else _over(self.y[rows], np.mean)
            row = {"line": self.label, "x": self.x[rows[-1]], "y": y, "kind": self.kind}
            if low is not None and high is not None:
                row |= {"low": _over(low[rows], np.min), "high": _over(high[rows], np.max)}
            yield {name: _json(value) for name, value in row.items()}


def axis(title: str, *, share: bool = False, zero: bool = False) -> Spec:
    """Return an axis along y; a share is in percent from 0."""
    return {"title": title, "scale": {"zero": share or zero}} | (
        {"axis": {"format": ".2~%"}} if share else {}
    )


def chart(lines: Sequence[Line], x: Spec, y: Spec, levels: Sequence[tuple[str, Estimate]] = ()) -> Spec:
    """Return lines over numbers, or points over the names of bins, with a legend that hides and shows them.

    Over steps (``x`` is :data:`STEP`) the page smooths them and makes y logarithmic, and intervals are bands.
    ``levels`` are a colour and a value across the figure, dashed without an interval.
    """
    over_steps, rows = x is STEP, [row for line in lines for row in line.rows()]
    joined = all(line.x.dtype.kind in "iuf" for line in lines)
    along: Spec = {"field": "x", "type": "quantitative" if joined else "nominal"} | x
    along |= {"scale": x.get("scale") or {"zero": False, "nice": False}} if joined else {"sort": None}
    base: Spec = {"x": along, "color": _colours(lines)}
    if not joined and any(len(line.x) > 1 for line in lines):
        base["xOffset"] = {"field": "line", "sort": None}
    across = _log_axis(y) if over_steps else y
    marks = [_level(colour, level, across, over_steps) for colour, level in levels]
    if any("low" in row for row in rows):
        ends = {"y": _across("low", across), "y2": {"field": "at_high"}}
        mark: Spec = {"type": "area", "opacity": 0.17} if over_steps else {"type": "rule", "strokeWidth": 1.3}
        marks.append({"mark": mark, "encoding": base | ends})
    dots = base | {"y": _across("mean", across)}
    if any(line.dashed for line in lines):
        dashes = [_DASHES if line.dashed else [1, 0] for line in lines]
        legend = base["color"]["legend"]
        base |= {"strokeDash": {"field": "line", "scale": _scale(lines, dashes), "legend": legend}}
    for name, kinds, style in (
        ("y", {SMOOTHED}, {"opacity": 0.3, "strokeWidth": 1}),
        ("mean", {SMOOTHED, PLAIN}, {"strokeWidth": 1.8}),
        ("mean", {HELD}, {"strokeWidth": 1.8, "interpolate": "step-after"}),
    ):
        if joined and kinds & {line.kind for line in lines} and (over_steps or name == "mean"):
            only = {"filter": {"field": "kind", "oneOf": [*kinds]}}
            encoding = base | {"y": _across(name, across)}
            marks.append({"mark": {"type": "line", **style}, "transform": [only], "encoding": encoding})
    titles = {"line": " ", "x": x["title"] or " ", "y": y["title"], "low": "low", "high": "high"}
    dots["tooltip"] = _tooltip([*titles.items()][: 5 if any("low" in row for row in rows) else 3])
    near = {"condition": {"param": "near", "empty": False, "value": 70}}
    dots["size"] = {**near, "value": 28 if len(rows) <= 60 * len(lines) else 0}
    nearest = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    selections = [{"name": "near", "select": nearest}, _toggles(line.label for line in lines)]
    selections += [_zoom("x")] if joined else []
    marks.append({"mark": _DOT, "params": selections, "encoding": dots})
    bound = (("smoothing", 0), ("logarithmic", "linear")) if over_steps else ()
    params = [{"name": name, "value": value, "bind": {"element": f"#{name}"}} for name, value in bound]
    data = {"data": {"values": rows}, "transform": [*_computed(over_steps)]}
    return _sized({"params": params, **data, "layer": marks})


def heatmap(cells: Array, x_label: str, y_label: str, label: str) -> Spec:
    """Return the cells [rows, columns] of a table in colours, 0 the darkest."""
    data = [{"x": x, "y": y, "value": _json(value)} for (y, x), value in np.ndenumerate(cells)]
    colour = {"scheme": "cividis", "domainMin": 0}
    encoding = {
        "x": {"field": "x", "type": "ordinal", "title": x_label, "axis": {"labelAngle": 0}},
        "y": {"field": "y", "type": "ordinal", "title": y_label, "sort": "descending"},
        "color": {"field": "value", "type": "quantitative", "scale": colour, "legend": {"title": label}},
        "tooltip": _tooltip([("y", y_label), ("x", x_label), ("value", label)]),
    }
    return _sized({"data": {"values": data}, "mark": "rect", "encoding": encoding})


def cloud(points: Sequence[Line], edges: Sequence[Line], x: Spec, y: Spec, limit: float) -> Spec:
    """Return points, and the lines between which they belong; a point beyond ``limit`` along y is a triangle
    at the edge of the figure."""
    tests = (f"datum.y > {limit}", "triangle-up"), (f"datum.y < {-limit}", "triangle-down")
    shape: Spec = {"condition": [{"test": test, "value": to} for test, to in tests], "value": "circle"}
    axes: Spec = {"x": {"field": "x", "type": "quantitative"} | x}
    axes["y"] = {"field": "at", "type": "quantitative", "scale": {"domain": [-limit, limit]}} | y
    titles = [("line", " "), ("x", x["title"]), ("y", y["title"])]
    shown = {
        "data": {"values": [row for one in points for row in one.rows(len(one.x))]},
        "mark": {"type": "point", "filled": True, "opacity": 0.6, "clip": True, "size": 16},
        "params": [_toggles(one.label for one in points), _zoom("x", "y")],
        "transform": [_SHOWN, {"calculate": f"clamp(datum.y, {-0.98 * limit}, {0.98 * limit})", "as": "at"}],
        "encoding": {**axes, "color": _colours(points), "shape": shape, "tooltip": _tooltip(titles)},
    }
    band = {
        "data": {"values": [row for line in edges for row in line.rows()]},
        "mark": {"type": "line", "color": EDGE, "strokeWidth": 1.4, "clip": True},
        "encoding": axes | {"y": axes["y"] | {"field": "y"}, "detail": {"field": "line"}},
    }
    return _sized({"layer": [shown, band] if edges else [shown]})


def as_svg(spec: Spec, width: int = 460) -> str:
    """Return the text of the ``<svg>`` that a page of this width (pixels) would show."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg({**spec, "width": width}))


def _sized(spec: Spec) -> Spec:
    """Return a figure as wide as the page has place for it."""
    size = {"width": "container", "height": 210, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**size, "config": _CONFIG, **spec}


def _scale(lines: Sequence[Line], values: Sequence[Any]) -> Spec:
    labels = dict(zip((line.label for line in lines), values, strict=True))
    return {"domain": [*labels], "range": [*labels.values()]}


def _colours(lines: Sequence[Line]) -> Spec:
    """Return the encoding by colour, whose legend is as wide as a telephone."""
    longest = max((len(line.label) for line in lines), default=0)
    legend = {"columns": max(1, min(4, 48 // (longest + 5)))} if longest else None
    return {"field": "line", "scale": _scale(lines, [line.colour for line in lines]), "legend": legend}


def _tooltip(titles: Sequence[tuple[str, str]]) -> list[Spec]:
    number = {"type": "quantitative", "format": ".4~g"}
    return [
        {"field": name, "title": title} | ({"type": "nominal"} if name in ("line", "x") else number)
        for name, title in titles
    ]


def _toggles(labels: Iterable[str]) -> Spec:
    """Return the selection of the labels that are shown, which a click into the legend changes."""
    select = {"type": "point", "fields": ["line"], "toggle": "true"}
    shown = [{"line": label} for label in labels]
    return {"name": "shown", "select": select, "bind": "legend", "value": shown}


def _zoom(*axes: str) -> Spec:
    """Return the selection that moves and widens the axes. The wheel alone scrolls the page."""
    select = {"type": "interval", "encodings": [*axes], "zoom": "wheel![event.shiftKey]"}
    return {"name": "zoom", "select": select, "bind": "scales"}


def _computed(over_steps: bool) -> Iterator[Spec]:
    """Yield what the browser computes: the running mean, and the places ``at_…`` of values along y."""
    yield _SHOWN
    yield {"filter": f"!({_LOG}) || datum.y > 0" if over_steps else "true"}
    frame = [{"signal": "-smoothing"}, {"signal": "+smoothing"}] if over_steps else [0, 0]
    mean = {"op": "mean", "field": "y", "as": "smooth"}
    yield {"window": [mean], "frame": frame, "groupby": ["line"], "sort": [{"field": "x"}]}
    yield {"calculate": "datum.kind > 0 || datum.y == null ? datum.y : datum.smooth", "as": "mean"}
    yield from _places(("mean", "y", "low", "high"), over_steps)


def _places(names: Iterable[str], over_steps: bool) -> Iterator[Spec]:
    for name in names:
        logarithm = f"{_LOG} && datum.{name} != null ? log(max(datum.{name}, 1e-30)) / LN10 : datum.{name}"
        yield {"calculate": logarithm if over_steps else f"datum.{name}", "as": f"at_{name}"}


def _across(name: str, y: Spec) -> Spec:
    return {"field": f"at_{name}", "type": "quantitative"} | y


def _log_axis(y: Spec) -> Spec:
    """Return the axis that shows logarithms as the numbers they are of, if the page says so."""
    form = y.get("axis", {}).get("format")
    linear = f"format(datum.value, '{form}')" if form else _NUMBER
    label = f"{_LOG} ? format(pow(10, datum.value), '{'.1~%' if form else ',.2~r'}') : {linear}"
    zero = {"expr": f"!({_LOG})"} if y["scale"].get("zero") else False
    return y | {"axis": {"labelExpr": label}, "scale": y["scale"] | {"zero": zero}}


def _level(colour: str, level: Estimate, y: Spec, over_steps: bool) -> Spec:
    row, plain = {name: _json(value) for name, value in vars(level).items()}, math.isnan(level.low)
    ends = {"y": _across("low", y), "y2": {"field": "at_high"}}
    rule = {"type": "rule", "color": colour, "strokeWidth": 1.3, "strokeDash": _DASHES if plain else [1, 0]}
    span = {"mark": {"type": "rect", "color": colour, "opacity": 0.2}, "encoding": ends}
    layer = [*([] if plain else [span]), {"mark": rule, "encoding": {"y": _across("value", y)}}]
    return {"data": {"values": [row]}, "transform": [*_places(row, over_steps)], "layer": layer}


def _over(values: Array, of: Any) -> Any:
    """Return what ``of`` returns of the values that are not NaN."""
    finite = values[np.isfinite(values)]
    return of(finite) if len(finite) else math.nan


def _json(value: Any) -> Any:
    """Return a value as JSON has it: five digits of a number, and null for NaN."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    return float(f"{value:.5g}") if math.isfinite(value) else None
