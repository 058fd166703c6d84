"""The pictures of the pages of one run and of several.

With several runs each has one colour, the same in every picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fspo.evaluation.intervals import Estimate, wilson_interval
from megatron_fspo.lab.report import charts
from megatron_fspo.lab.report.charts import BLUE, EDGE, GREEN, LENGTH, ORANGE, Line, Spec, axis, chart
from megatron_fspo.lab.report.history import Array, BinRates, Records
from megatron_fspo.objective import ClipBand, LengthReweightingError

_CLOUD = 1500
"""Records in the picture of S, at most, evenly over those of the step."""


def rates_by(bins: Sequence[BinRates], overall: BinRates, x_label: str) -> Spec:
    """Return the clip rates per bin with 95% intervals, and of all records as dashed lines."""
    lines, levels = [], []
    for share, of, colour, label in (
        ("out_of_band", "records", BLUE, "outside"),
        ("clipped_falling", "falling", ORANGE, "clipped, of those with A < 0"),
        ("clipped_rising", "rising", GREEN, "clipped, of those with A > 0"),
    ):
        if kept := [bin for bin in bins if getattr(bin, of)]:
            names = [f"{bin.low}" if bin.low == bin.high else f"{bin.low}–{bin.high}" for bin in kept]
            found = [wilson_interval(getattr(bin, share), getattr(bin, of)) for bin in kept]
            lines.append(_line(np.array(names), found, label=label, colour=colour))
            levels.append((colour, _alone(getattr(overall, share))))
    x: Spec = {"title": x_label, "axis": {"labelAngle": -30, "labelOverlap": False}}
    return chart(lines, x, axis("share of sequences", share=True), levels)


def _line(x: Array, estimates: Sequence[Estimate], scale: float = 1.0, **style: Any) -> Line:
    """Return estimates over ``scale``, with their intervals."""
    rows = np.array([(estimate.value, estimate.low, estimate.high) for estimate in estimates]) / scale
    y, low, high = rows.T
    return Line(x=x, y=y, low=low, high=high, **style)


def _alone(value: float) -> Estimate:
    return Estimate(value=value, low=math.nan, high=math.nan)


def _pooled(error: LengthReweightingError) -> Estimate:
    low, high = error.mean_interval
    return Estimate(value=error.mean, low=low, high=high)


def pooled(error: LengthReweightingError) -> list[tuple[str, Estimate]]:
    """Return a pooled LRE with its interval, and what chance alone gives."""
    return [(GREEN, _pooled(error)), (EDGE, _alone(error.null_mean))]


def scatter(records: Records, band: ClipBand | None) -> Spec:
    """Return S against √L with the band; what lies outside the picture is a triangle at its edge."""
    shown, longest, edges = records.thinned(_CLOUD), float(records.length.max()), []
    everything, some = (np.where(one.clipped, 2, one.out_of_band) for one in (records, shown))
    points = [
        Line(
            label=f"{label} {(everything == kind).sum():,}",
            colour=colour,
            x=shown.length[some == kind],
            y=shown.log_ratio_sum[some == kind],
        )
        for kind, label, colour in ((0, "inside", BLUE), (1, "outside, kept", GREEN), (2, "clipped", ORANGE))
    ]
    if band is not None:
        grid = torch.linspace(0.0, 1.0, 60).square() * longest
        bounds = zip(("low", "high"), band.bounds(grid), strict=True)
        edges = [Line(label=end, colour=EDGE, x=grid.numpy(), y=edge.numpy()) for end, edge in bounds]
    x: Spec = {"title": "response length L (tokens, spaced as √L)", "scale": {"type": "sqrt"}}
    return charts.cloud(points, edges, x, {"title": "S (nats)"}, _scatter_limit(records, band))


def _scatter_limit(records: Records, band: ClipBand | None) -> float:
    """Return the largest |S| in the picture: 95% of the records, and the whole band with a margin."""
    robust = float(np.quantile(np.abs(records.log_ratio_sum), 0.95))
    if band is None:
        return robust or 1.0
    edges = torch.cat(band.bounds(torch.tensor([1.0, float(records.length.max())])))
    return max(1.4 * edges.abs().max().item(), robust)


def expert_load(load: Array) -> Spec:
    """Return tokens of each expert [layers, experts] over the even load of its layer."""
    even = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
    return charts.heatmap(even, "expert", "layer", "times the even load")


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Rates of one run by length."""

    label: str
    bins: Sequence[BinRates]
    overall: float
    """Share outside the band over all lengths."""


def choose_style(position: int) -> dict[str, Any]:
    """Return the colour, and whether it is dashed, of the run at this position."""
    round_, at = divmod(position, len(charts.COLOURS))
    return {"colour": charts.COLOURS[at], "dashed": round_ % 2 == 1}


def by_length(runs: Sequence[LengthCurve], *, relative: bool = False) -> Spec:
    """Share outside the band by length, with 95% intervals; relative: over the run's own share, which is one
    scale for runs that clip unequally often."""
    lines = []
    for position, curve in enumerate(runs):
        scale = curve.overall if relative else 1.0
        if curve.bins and scale > 0:
            lengths = np.array([(bin.low * bin.high) ** 0.5 for bin in curve.bins])
            found = [wilson_interval(bin.out_of_band, bin.records) for bin in curve.bins]
            lines.append(_line(lengths, found, scale, label=curve.label, **choose_style(position)))
    if relative:
        y = axis("outside, over the run's own rate", zero=True)
        return chart(lines, LENGTH, y, [(EDGE, _alone(1.0))])
    return chart(lines, LENGTH, axis("outside the band", share=True))


def length_errors(errors: Sequence[tuple[str, LengthReweightingError]]) -> Spec:
    """Return the pooled LRE of every run, by its label, with its interval, and what chance alone gives it."""
    found = [(at, label, error) for at, (label, error) in enumerate(errors) if np.isfinite(error.mean)]
    lines = [
        _line(np.array([label]), [_pooled(error)], label=label, **choose_style(at))
        for at, label, error in found
    ]
    names, floors = (
        np.array(column) for column in zip(*((n, e.null_mean) for _, n, e in found), strict=True)
    )
    lines.append(Line(label="by chance", colour=charts.GREY, x=names, y=floors))
    return chart(
        lines,
        {"title": None, "axis": {"labelAngle": -30, "labelOverlap": False}},
        axis("pooled LRE", zero=True),
    )
