"""The pictures of the pages of one run and of several.

With several runs each has one colour, the same in every picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fspo.evaluation.intervals import Estimate, wilson_interval
from megatron_fspo.lab.report.charts import (
    BLUE,
    COLOURS,
    GREEN,
    LENGTH,
    ORANGE,
    Level,
    Line,
    Spec,
    axis,
    chart,
    cloud,
    heatmap,
)
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
            ends = _columns([wilson_interval(getattr(bin, share), getattr(bin, of)) for bin in kept])
            lines.append(Line(label=label, colour=colour, x=np.array(names), **ends))
            levels.append(Level(value=getattr(overall, share), colour=colour))
    x: Spec = {"title": x_label, "axis": {"labelAngle": -30}}
    return chart(lines, x, axis("share of sequences", share=True), levels=levels, joined=False, bars=True)


def _columns(estimates: Sequence[Estimate], scale: float = 1.0) -> dict[str, Array]:
    """Return the values y [n], and their ends low and high, over ``scale``."""
    rows = np.array([(estimate.value, estimate.low, estimate.high) for estimate in estimates]) / scale
    return dict(zip(("y", "low", "high"), rows.T, strict=True))


def pooled(error: LengthReweightingError, colour: str) -> list[Level]:
    """Return a pooled LRE with its interval, and below it what chance alone gives."""
    return [Level(value=error.mean, low=error.mean_interval[0], high=error.mean_interval[1], colour=colour,
                  dashed=False), Level(value=error.null_mean)]  # fmt: skip


def beyond(records: Records, band: ClipBand | None) -> Array:
    """Return [N] bool: the records that lie outside the scatter picture."""
    return np.abs(records.log_ratio_sum) > _scatter_limit(records, band)


def scatter(records: Records, band: ClipBand | None) -> Spec:
    """Return S against √L with the band; what lies outside the picture is a triangle at its edge."""
    limit, shown = _scatter_limit(records, band), records.thinned(_CLOUD)
    groups = {}
    for of, label, colour in (
        (lambda one: ~one.out_of_band & ~one.clipped, "inside", BLUE),
        (lambda one: one.out_of_band & ~one.clipped, "outside, kept", GREEN),
        (lambda one: one.clipped, "clipped", ORANGE),
    ):
        some = shown.select(of(shown))
        points = zip(some.length, some.log_ratio_sum, strict=True)
        groups[f"{label} {of(records).sum():,}"] = colour, [{"x": x, "y": y} for x, y in points]
    longest, edges = float(records.length.max()), []
    if band is not None:
        grid = torch.linspace(0.0, 1.0, 60).square() * longest
        x = grid.numpy()
        edges = [
            Line(label=name, colour=BLUE, x=x, y=edge.numpy())
            for name, edge in zip(("low", "high"), band.bounds(grid), strict=True)
        ]
    x_axis: Spec = {"title": "response length L (tokens, spaced as √L)", "scale": {"type": "sqrt"}}
    return cloud(groups, edges, x_axis, {"title": "S (nats)", "scale": {"domain": [-limit, limit]}}, limit)


def _scatter_limit(records: Records, band: ClipBand | None) -> float:
    """Return the largest |S| in the picture: 95% of the records, and the whole band with a margin."""
    if not len(records):
        return 1.0
    robust = float(np.quantile(np.abs(records.log_ratio_sum), 0.95))
    if band is None:
        return robust or 1.0
    edges = torch.cat(band.bounds(torch.tensor([1.0, float(records.length.max())])))
    return max(1.4 * edges.abs().max().item(), robust)


def expert_load(load: Array) -> Spec:
    """Return tokens of each expert [layers, experts] over the even load of its layer."""
    even = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
    return heatmap(even, "expert", "layer", "times the even load")


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Rates of one run by length."""

    label: str
    bins: Sequence[BinRates]
    overall: float
    """Share outside the band over all lengths."""


def choose_style(position: int) -> dict[str, str | bool]:
    """Return the colour, and whether it is dashed, of the run at this position."""
    return {"colour": COLOURS[position % len(COLOURS)], "dashed": position // len(COLOURS) % 2 == 1}


def by_length(runs: Sequence[LengthCurve], *, relative: bool = False) -> Spec:
    """Share outside the band by length, with 95% intervals; relative: over the run's own share, which is one
    scale for runs that clip unequally often."""
    lines = []
    for position, curve in enumerate(runs):
        scale = curve.overall if relative else 1.0
        if curve.bins and scale > 0:
            lengths = np.array([(bin.low * bin.high) ** 0.5 for bin in curve.bins])
            ends = _columns([wilson_interval(bin.out_of_band, bin.records) for bin in curve.bins], scale)
            lines.append(Line(label=curve.label, x=lengths, **ends, **choose_style(position)))
    if relative:
        y = axis("outside, over the run's own rate", zero=True)
        return chart(lines, LENGTH, y, levels=[Level(value=1.0)], bars=True)
    return chart(lines, LENGTH, axis("outside the band", share=True), bars=True)


def length_errors(errors: Sequence[tuple[str, LengthReweightingError]]) -> Spec:
    """Return the pooled LRE of every run, by its label, with its interval, on its own null floor."""
    lines = [
        Line(
            label=label,
            x=np.array([label]),
            **{name: np.array([at]) for name, at in zip(("y", "low", "high"), (error.mean, *error.mean_interval))},
            floor=error.null_mean,
            **choose_style(position),
        )
        for position, (label, error) in enumerate(errors)
        if np.isfinite(error.mean)
    ]  # fmt: skip
    x: Spec = {"title": None, "axis": {"labelAngle": -30}}
    return chart(lines, x, axis("pooled LRE", zero=True), joined=False, bars=True)
