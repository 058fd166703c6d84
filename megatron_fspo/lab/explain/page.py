"""The comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megatron_fspo import __version__
from megatron_fspo.lab.explain.explanation import Bin, Explanation, LengthFigures, OfLoss
from megatron_fspo.lab.explain.text import bins_table, fates_table, limits_table, losses_table, sentences
from megatron_fspo.lab.report.drawing import BLUE, GREEN, ORANGE, PURPLE, legend, picture
from megatron_fspo.lab.report.page import template

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


def write_page(explanation: Explanation, path: Path) -> None:
    """Write the page."""
    compared = explanation.matched or explanation.given
    svgs = {
        "given": _by_length(explanation.bins, explanation.given, lambda x: x.out_of_band, "outside the band"),
        "matched": _by_length(explanation.bins, compared, lambda x: x.out_of_band, "outside the band"),
        "noise": _by_length(explanation.bins, explanation.given, lambda x: x.noise, "outside by noise alone"),
        "ess": _by_length(explanation.bins, compared, lambda x: x.ess, "effective sample size"),
        "mass": _by_length(explanation.bins, compared, lambda x: x.mass, "share of the gradient"),
    }
    text = template(Path(__file__).with_name("page.html")).render(
        explanation=explanation,
        words=list(sentences(explanation)),
        given=losses_table(explanation.given),
        matched=losses_table(explanation.matched),
        bins=bins_table(explanation, compared),
        fates=fates_table(explanation),
        limits=limits_table(explanation),
        svgs={name: Markup(svg) for name, svg in svgs.items()},
        version=__version__,
    )
    path.write_text(text, encoding="utf-8")


@picture(4.6, 3.2)
def _by_length(
    figure: Figure,
    bins: Sequence[Bin],
    losses: Sequence[OfLoss],
    of: Callable[[LengthFigures], float],
    label: str,
) -> None:
    axes = figure.subplots()
    at = [(one.low * one.high) ** 0.5 for one in bins]
    for one, colour in zip(losses, _COLOURS, strict=False):
        axes.plot(
            at, [of(x) for x in one.by_length], color=colour, marker="o", ms=3.5, lw=1.4, label=one.name
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("response length L (tokens)")
    axes.set_ylabel(label)
    legend(axes)
