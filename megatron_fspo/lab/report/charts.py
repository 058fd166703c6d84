"""Figures of all pages, as specifications in Vega-Lite: the browser draws them, and they answer the mouse.

:func:`as_svg` draws one without a browser, for trackers and documents. Colours of curves are Okabe and Ito's,
which the colour-blind can tell apart, and stand out from a light page and from a dark one; text, axes and
grid follow the page (``style.css`` has the variables).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fspo.lab.report.history import Array, Series

Spec = dict[str, Any]
"""A specification in Vega-Lite, or a part of one."""
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7c8493"
YELLOW, SKY = "#c98a00", "#56b4e9"
"""Okabe and Ito's yellow is a little darker here: theirs is lost on white."""
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY)
"""Of lines side by side, the first ones first."""
TEXT, AXIS = "var(--figure-text, #374151)", "var(--figure-axis, #9ca3af)"
GRID, EDGE = "var(--figure-grid, #e5e7eb)", "var(--figure-edge, #111827)"
STEP: Spec = {"title": "step", "axis": {"tickMinStep": 1, "format": ",d"}}
LENGTH: Spec = {"title": "response length L (tokens)", "scale": {"type": "log", "base": 2}}
_DASHES = [5, 3]
_MOST = 300
"""Points of a line: of a longer one each is the mean of a stretch, within its extremes."""
_LOG = "logarithmic == 'log'"
_NUMBER = "({0} == 0 || abs({0}) >= 1e-3 ? format({0}, ',.4~r') : format({0}, '.1~e'))"
_CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {"domainColor": AXIS, "tickColor": AXIS, "gridColor": GRID, "labelColor": TEXT, "titleColor": TEXT}
    | {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelOverlap": True},
    "legend": {"orient": "top", "direction": "horizontal", "title": None, "labelColor": TEXT}
    | {"titleColor": TEXT, "symbolOpacity": 1, "labelFontSize": 11, "labelLimit": 330, "symbolSize": 60, "symbolStrokeWidth": 2},
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
    smoothed: bool = True
    """Whether the page may smooth it."""
    held: bool = False
    """True for a setting, which stays as it is until a step changes it: drawn in steps, and not smoothed."""
    floor: float | None = None
    """What chance alone would give, drawn across the points."""

    @classmethod
    def over_steps(cls, series: Series, ends: Sequence[Series] = (), **style: Any) -> Line:
        """Return a metric over steps, with the ends of its interval where every value has them."""
        whole = len(ends) == 2 and all(np.array_equal(end.steps, series.steps) for end in ends)
        low, high = (end.values for end in ends) if whole else (None, None)
        return cls(x=series.steps, y=series.values, low=low, high=high, **style)

    def rows(self) -> Iterator[Spec]:
        """Yield at most :data:`_MOST` rows of data: label, x, y, and low, high and floor where there are any."""
        kept = [np.array([at]) for at in range(len(self.x))]
        low, high = self.low, self.high
        if self.held and len(self.x):
            changes = np.flatnonzero(self.y[1:] != self.y[:-1]) + 1
            thinned = changes[:: 1 + len(changes) // _MOST]
            kept = [np.array([at]) for at in np.unique([0, *thinned, len(self.x) - 1])]
        elif len(self.x) > _MOST:
            kept = np.array_split(np.arange(len(self.x)), _MOST)
            low, high = (self.y if end is None else end for end in (low, high))
        for rows in kept:
            row = {"line": self.label, "x": self.x[rows[-1]], "y": _mean(self.y[rows])}
            if low is not None and high is not None:
                row |= {"low": _mean(low[rows], np.min), "high": _mean(high[rows], np.max)}
            row |= {} if self.floor is None else {"floor": self.floor}
            row |= {"held": True} if self.held else {} if self.smoothed else {"held": False}
            yield {name: _json(value) for name, value in row.items()}


@dataclass(frozen=True, kw_only=True)
class Level:
    """A value across the whole figure, with its interval if it has one."""

    value: float
    low: float = math.nan
    high: float = math.nan
    colour: str = EDGE
    dashed: bool = True


def axis(title: str, *, share: bool = False, top: float | None = None, zero: bool = False) -> Spec:
    """Return an axis along y; a share is in percent from 0."""
    scale = {"zero": share or zero} | ({} if top is None else {"domainMax": top})
    return {"title": title, "scale": scale} | ({"axis": {"format": ".3~%"}} if share else {})


def chart(
    lines: Sequence[Line],
    x: Spec,
    y: Spec,
    *,
    levels: Sequence[Level] = (),
    joined: bool = True,
    bars: bool = False,
) -> Spec:
    """Return lines over numbers, or points over the names of bins, with a legend that hides and shows them.

    Over steps (``x`` is :data:`STEP`) the page smooths them and makes y logarithmic. Intervals are bands, or
    ``bars``; without ``joined`` there are points only.
    """
    over_steps, rows = x is STEP, [row for line in lines for row in line.rows()]
    kind = "quantitative" if all(line.x.dtype.kind in "iuf" for line in lines) else "nominal"
    along = {"field": "x", "type": kind} | x | ({"sort": None} if kind == "nominal" else {})
    if kind == "quantitative":
        along["scale"] = {"zero": False, "nice": False} | x.get("scale", {})
    base: Spec = {"x": along, "color": _colours(lines)}
    if kind == "nominal" and len(lines) > 1 and not joined:
        base["xOffset"] = {"field": "line", "sort": None}
    if any(line.dashed for line in lines):
        dashes = [_DASHES if line.dashed else [1, 0] for line in lines]
        base["strokeDash"] = {"field": "line", "scale": _scale(lines, dashes), "legend": base["color"]["legend"]}
    across = _log_axis(y) if over_steps else y
    marks = [_level(level, across, over_steps) for level in levels]
    if any("low" in row for row in rows):
        ends = {"y": _across("low", across), "y2": {"field": _at("high")}}
        mark: Spec = {"type": "rule", "strokeWidth": 1.3} if bars else {"type": "area", "opacity": 0.17}
        plain = {name: encoding for name, encoding in base.items() if name != "strokeDash"}
        marks.append({"mark": mark, "encoding": plain | ends})
    if over_steps:
        pale: Spec = {"mark": {"type": "line", "opacity": 0.3, "strokeWidth": 1}}
        pale |= {"transform": [{"filter": "datum.held == null"}]}
        marks.append(pale | {"encoding": base | {"y": _across("y", across)}})
    if joined:
        for held in {line.held for line in lines}:
            mark = {"type": "line", "strokeWidth": 1.8} | ({"interpolate": "step-after"} if held else {})
            only = {"filter": f"{'' if held else '!'}datum.held"}
            marks.append({"mark": mark, "transform": [only], "encoding": base | {"y": _across("mean", across)}})
    if any(line.floor is not None for line in lines):
        tick = {"type": "tick", "color": EDGE, "thickness": 2, "width": 40}
        marks.append({"mark": tick, "encoding": {"x": along, "y": _across("floor", across)}})
    dots = not joined or len(rows) <= 60 * max(len(lines), 1)
    marks.append(_points(base | {"y": _across("mean", across)}, rows, x, y, shown=dots))
    spec = {"data": {"values": rows}, "transform": [*_computed(over_steps)], "layer": marks}
    shown = {"select": {"type": "point", "fields": ["line"], "toggle": "true"}, "bind": "legend"}
    marks[-1]["params"].append({"name": "shown", **shown, "value": [{"line": line.label} for line in lines]})
    if kind == "quantitative":
        marks[-1]["params"].append(_zoom("x"))
    bound = (("smoothing", 0), ("logarithmic", "linear")) if over_steps else ()
    params = [{"name": name, "value": value, "bind": {"element": f"#{name}"}} for name, value in bound]
    return _sized(spec | {"params": params})


def heatmap(cells: Array, x_label: str, y_label: str, label: str) -> Spec:
    """Return the cells [rows, columns] of a table in colours, 0 the darkest."""
    data = [
        {"x": column, "y": row, "value": _json(value)}
        for row, values in enumerate(cells)
        for column, value in enumerate(values)
    ]
    colour = {"scheme": "cividis", "domainMin": 0}
    encoding = {
        "x": {"field": "x", "type": "ordinal", "title": x_label, "axis": {"labelAngle": 0}},
        "y": {"field": "y", "type": "ordinal", "title": y_label, "sort": "descending"},
        "color": {"field": "value", "type": "quantitative", "scale": colour, "legend": {"title": label}},
        "tooltip": _tooltip({"y": y_label, "x": x_label, "value": label}),
    }
    return _sized({"data": {"values": data}, "mark": "rect", "encoding": encoding})


def cloud(
    groups: Mapping[str, tuple[str, Iterable[Spec]]], edges: Sequence[Line], x: Spec, y: Spec, limit: float
) -> Spec:
    """Return points, by their label with its colour and rows {x, y}, and lines between which they belong. What
    lies beyond ``limit`` along y is a triangle at the edge of the figure."""
    rows = [
        {"line": label} | {name: _json(value) for name, value in row.items()}
        for label, (_, points) in groups.items()
        for row in points
    ]
    colours = [Line(label=label, colour=of, x=np.empty(0), y=np.empty(0)) for label, (of, _) in groups.items()]
    sides = {"datum.y > high": "triangle-up", "datum.y < low": "triangle-down"}
    test = [{"test": test.replace("high", f"{limit}").replace("low", f"-{limit}"), "value": shape}
            for test, shape in sides.items()]  # fmt: skip
    axes = {"x": {"field": "x", "type": "quantitative"} | x, "y": {"field": "at", "type": "quantitative"} | y}
    shown = {"select": {"type": "point", "fields": ["line"], "toggle": "true"}, "bind": "legend"}
    points = {
        "mark": {"type": "point", "filled": True, "opacity": 0.6, "clip": True, "size": 16},
        "params": [{"name": "shown", **shown, "value": [{"line": label} for label in groups]}, _zoom("x", "y")],
        "transform": [
            {"filter": {"param": "shown", "empty": False}},
            {"calculate": f"clamp(datum.y, -{0.98 * limit}, {0.98 * limit})", "as": "at"},
        ],
        "encoding": axes
        | {"color": _colours(colours), "shape": {"condition": test, "value": "circle"}}
        | {"tooltip": _tooltip({"line": " ", "x": x["title"], "y": y["title"]})},
    }
    band = {
        "data": {"values": [{**row, "at": row["y"]} for line in edges for row in line.rows()]},
        "mark": {"type": "line", "color": EDGE, "strokeWidth": 1.4, "clip": True},
        "encoding": axes | {"detail": {"field": "line"}},
    }
    return _sized({"data": {"values": rows}, "layer": [points, band] if edges else [points]})


def as_svg(spec: Spec, width: int = 460) -> str:
    """Return the text of the ``<svg>`` that a page of this width (pixels) would show."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg({**spec, "width": width}))


def _sized(spec: Spec) -> Spec:
    """Return a figure as wide as the page has place for it."""
    return {"width": "container", "height": 210, "autosize": {"type": "fit-x", "contains": "padding"}} | {
        "config": _CONFIG,
        **spec,
    }


def _scale(lines: Sequence[Line], values: Sequence[Any]) -> Spec:
    labels = dict(zip((line.label for line in lines), values, strict=True))
    return {"domain": [*labels], "range": [*labels.values()]}


def _colours(lines: Sequence[Line]) -> Spec:
    """Return the encoding by colour, whose legend is as wide as a telephone."""
    longest = max((len(line.label) for line in lines), default=0)
    legend = {"columns": max(1, min(4, 48 // (longest + 5)))} if longest else None
    return {"field": "line", "scale": _scale(lines, [line.colour for line in lines]), "legend": legend}


def _points(encoding: Spec, rows: Sequence[Spec], x: Spec, y: Spec, *, shown: bool) -> Spec:
    """Return the points: the nearest one tells its values, and without ``shown`` is seen only then."""
    fields = {"line": " ", "x": x["title"], "y": y["title"]}
    fields |= {name: name for name in ("low", "high", "floor") if any(name in row for row in rows)}
    near = {"select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
    size = {"condition": {"param": "near", "empty": False, "value": 70}, "value": 28 if shown else 0}
    return {
        "mark": {"type": "point", "filled": True, "opacity": 1},
        "params": [{"name": "near", **near}],
        "encoding": {name: value for name, value in encoding.items() if name != "strokeDash"}
        | {"size": size, "tooltip": _tooltip(fields)},
    }


def _tooltip(titles: Mapping[str, str]) -> list[Spec]:
    numbers = {"y", "low", "high", "floor", "value"}
    form = {"type": "quantitative", "format": ".4~g"}
    return [
        {"field": name, "title": title} | (form if name in numbers else {"type": "nominal"})
        for name, title in titles.items()
    ]


def _zoom(*axes: str) -> Spec:
    """Return the selection that moves and widens the axes. The wheel alone scrolls the page."""
    select = {"type": "interval", "encodings": [*axes], "zoom": "wheel![event.shiftKey]"}
    return {"name": "zoom", "select": select, "bind": "scales"}


def _computed(over_steps: bool) -> Iterator[Spec]:
    """Yield what the browser computes: the running mean, and where y is logarithmic the logarithms."""
    yield {"filter": {"param": "shown", "empty": False}}
    names = ("low", "high", "y", "floor")
    if over_steps:
        yield {"filter": f"!({_LOG}) || datum.y > 0"}
        mean = {"op": "mean", "field": "y", "as": "smooth"}
        frame = [{"signal": "-smoothing"}, {"signal": "+smoothing"}]
        yield {"window": [mean], "frame": frame, "groupby": ["line"], "sort": [{"field": "x"}]}
        yield {"calculate": "datum.held != null || datum.y == null ? datum.y : datum.smooth", "as": "mean"}
        for name in ("mean", *names):
            yield {"calculate": _logarithm(name), "as": _at(name)}
    else:
        for name in names:
            yield {"calculate": f"datum.{name}", "as": _at(name)}
        yield {"calculate": "datum.y", "as": _at("mean")}


def _logarithm(name: str) -> str:
    return f"{_LOG} && datum.{name} != null ? log(max(datum.{name}, 1e-30)) / LN10 : datum.{name}"


def _at(name: str) -> str:
    """Return the field with the place of a value along y."""
    return f"at_{name}"


def _across(name: str, y: Spec) -> Spec:
    return {"field": _at(name), "type": "quantitative"} | y


def _log_axis(y: Spec) -> Spec:
    """Return the axis that shows logarithms as the numbers they are of, if the page says so."""
    form = y.get("axis", {}).get("format")
    value = f"({_LOG} ? pow(10, datum.value) : datum.value)"
    label = f"format({value}, '{form}')" if form else _NUMBER.format(value)
    scale = dict(y.get("scale", {}))
    scale["zero"] = {"expr": f"!({_LOG})"} if scale.get("zero") else False
    return y | {"axis": {"labelExpr": label}, "scale": scale}


def _level(level: Level, y: Spec, over_steps: bool) -> Spec:
    row = {name: _json(getattr(level, name)) for name in ("value", "low", "high")}
    place = _logarithm if over_steps else "datum.{}".format
    marks: list[Spec] = []
    if math.isfinite(level.low + level.high):
        ends = {"y": _across("low", y), "y2": {"field": _at("high")}}
        marks.append({"mark": {"type": "rect", "color": level.colour, "opacity": 0.2}, "encoding": ends})
    rule = {"type": "rule", "color": level.colour, "strokeWidth": 1.3}
    rule |= {"strokeDash": _DASHES} if level.dashed else {}
    marks.append({"mark": rule, "encoding": {"y": _across("value", y)}})
    computed = [{"calculate": place(name), "as": _at(name)} for name in row]
    return {"data": {"values": [row]}, "transform": computed, "layer": marks}


def _mean(values: Array, of: Any = np.mean) -> Any:
    if values.dtype.kind not in "iuf":
        return values[0]
    finite = values[np.isfinite(values)]
    return of(finite) if len(finite) else math.nan


def _json(value: Any) -> Any:
    """Return a value as JSON has it: five digits of a number, and null for NaN."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    return float(f"{value:.5g}") if math.isfinite(value) else None
