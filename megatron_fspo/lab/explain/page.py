"""The comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_fspo.lab.explain.explanation import Bin, Explanation, LossFigures
from megatron_fspo.lab.explain.text import bins_table, losses_table, outcomes_table, sentences
from megatron_fspo.lab.report.charts import COLOURS, LENGTH, Line, Spec, axis, chart
from megatron_fspo.lab.report.html import render_page


def write_page(explanation: Explanation, path: Path) -> None:
    """Write the comparison as an HTML file."""
    bins, given, matched = explanation.bins, explanation.given, explanation.matched
    compared = matched or given
    figures = {
        "given": _by_length(bins, given, "out_of_band", "outside the band"),
        "noise": _by_length(bins, given, "noise", "outside by noise alone"),
        "ess": _by_length(bins, compared, "ess", "effective sample size"),
        "mass": _by_length(bins, compared, "mass", "share of the gradient"),
    }
    if matched:
        figures["matched"] = _by_length(bins, matched, "out_of_band", "outside the band")
    text = render_page(
        Path(__file__).with_name("page.html"),
        figures,
        explanation=explanation,
        words=list(sentences(explanation)),
        given=losses_table(given),
        matched=losses_table(matched),
        bins=bins_table(explanation, compared),
        outcomes=outcomes_table(explanation),
    )
    path.write_text(text, encoding="utf-8")


def _by_length(bins: Sequence[Bin], losses: Sequence[LossFigures], name: str, label: str) -> Spec:
    """Return one of the ``LengthFigures``, by its name."""
    at = np.array([(bin.low * bin.high) ** 0.5 for bin in bins])
    lines = [
        Line(
            label=loss.name,
            colour=colour,
            x=at,
            y=np.array([getattr(x, name) for x in loss.by_length], float),
        )
        for loss, colour in zip(losses, COLOURS, strict=False)
    ]
    return chart(lines, LENGTH, axis(label, share=True))
