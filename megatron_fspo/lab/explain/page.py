"""The comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from megatron_fspo.lab.explain.explanation import Bin, Explanation, LossFigures
from megatron_fspo.lab.explain.text import bins_table, losses_table, outcomes_table, sentences
from megatron_fspo.lab.report.drawing import COLOURS, legend, length_axis, picture, share_axis
from megatron_fspo.lab.report.html import render_page


def write_page(explanation: Explanation, path: Path) -> None:
    """Write the comparison as an HTML file."""
    bins, given, matched = explanation.bins, explanation.given, explanation.matched
    compared = matched or given
    svgs = {
        "given": _by_length(bins, given, "out_of_band", "outside the band"),
        "noise": _by_length(bins, given, "noise", "outside by noise alone"),
        "ess": _by_length(bins, compared, "ess", "effective sample size"),
        "mass": _by_length(bins, compared, "mass", "share of the gradient"),
    }
    if matched:
        svgs["matched"] = _by_length(bins, matched, "out_of_band", "outside the band")
    text = render_page(
        Path(__file__).with_name("page.html"),
        svgs,
        explanation=explanation,
        words=list(sentences(explanation)),
        given=losses_table(given),
        matched=losses_table(matched),
        bins=bins_table(explanation, compared),
        outcomes=outcomes_table(explanation),
    )
    path.write_text(text, encoding="utf-8")


@picture(4.6, 3.2)
def _by_length(
    figure: Figure, bins: Sequence[Bin], losses: Sequence[LossFigures], name: str, label: str
) -> None:
    """Draw one of the ``LengthFigures``, by its name."""
    axes = figure.subplots()
    at = [(bin.low * bin.high) ** 0.5 for bin in bins]
    for loss, colour in zip(losses, COLOURS, strict=False):
        values = [getattr(x, name) for x in loss.by_length]
        axes.plot(at, values, color=colour, marker="o", ms=3.5, lw=1.4, label=loss.name)
    length_axis(axes)
    share_axis(axes, label)
    legend(axes)
