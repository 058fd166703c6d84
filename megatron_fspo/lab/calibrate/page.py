"""The calibration as text for the console and as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_fspo.evaluation.tables import Table, by_column, columns, number, percent, with_interval
from megatron_fspo.lab.report.charts import COLOURS, GREY, LENGTH, Line, Spec, axis, chart
from megatron_fspo.lab.report.html import render_page
from megatron_fspo.trainer.noise import Calibration, Interval, NoiseRecord, lengths_up_to

_COLOURS = (*COLOURS[:4], GREY)
KINDS = {
    "repeat": "the same pass again",
    "packs": "with other packs",
    "sampler": "trainer against sampler",
    "precision": "coarser against finer",
    "updates": "added to S by the updates",
}
"""Kind of a comparison → its words."""


def render(calibration: Calibration) -> str:
    """Return the text for the console."""
    return "\n".join(_lines(calibration))


def _lines(calibration: Calibration) -> Iterator[str]:
    yield (
        f"{calibration.responses} responses to {calibration.prompts} prompts, {calibration.tokens:,} tokens, "
        f"the longest {calibration.longest}; {calibration.model} in {calibration.dtype} on "
        f"{calibration.device}"
    )
    yield f"band: {calibration.band}; 95% intervals over prompts"
    yield ""
    yield from columns(*_comparisons(calibration))
    yield ""
    if calibration.flipped:
        yield "flipped: tokens whose router takes other experts; not compared with other packs"
    longest = calibration.max_response_tokens
    yield f"smallest c: noise alone leaves 1% outside at {longest} tokens; centred: on drift"
    if calibration.first_updates is not None:
        yield f"c = 2 sigma-hat of the first off-policy updates: {both(calibration.first_updates)}"
        if calibration.first_updates_exponent is not None:
            yield (
                "exponent of S there, of noise and of what training moves together: "
                f"{both(calibration.first_updates_exponent, '.2f')}; ½ is noise alone"
            )
    else:
        yield "no off-policy update was seen: responses were given, or nearly all groups had zero variance"
    noisy = _noisy(calibration)
    if not noisy:
        return
    yield ""
    yield "share of responses that noise alone puts outside the band, by length"
    tokens = [f"{at.length}{'' if at.length <= calibration.longest else ' *'}" for at in noisy[0].by_length]
    rates = {
        f"{record.kind}, {_name(record)}": [both(at.clip_rate, ".1%") for at in record.by_length]
        for record in noisy
    }
    yield from columns(*by_column({"tokens": tokens} | rates))
    if calibration.longest < longest:
        yield "* longer than any that was measured"
    yield ""
    yield "the same, predicted from the other half of the prompts, and measured"
    yield from columns(*_checks(noisy))


def _noisy(calibration: Calibration) -> list[NoiseRecord]:
    return [record for record in calibration.comparisons if (record.sigma[0] or 0) > 0]


def _comparisons(calibration: Calibration) -> Table:
    comparisons = calibration.comparisons
    cells = {
        "comparison": [KINDS[record.kind] for record in comparisons],
        "precision": [_name(record) for record in comparisons],
        "sigma / √token": [both(record.sigma) for record in comparisons],
        "drift / token": [both(record.drift) for record in comparisons],
        "exponent": [both(record.exponent, ".2f") for record in comparisons],
        "drift length": [both(record.drift_length, ",.0f") for record in comparisons],
        "smallest c": [both(record.smallest_c) for record in comparisons],
        "c, centred": [both(record.smallest_c_centred) for record in comparisons],
    }
    if calibration.flipped:
        cells["flipped"] = [percent(record.flips.tokens) if record.flips else "-" for record in comparisons]
        cells["sigma without"] = [
            both(record.flips.sigma_without) if record.flips else "-" for record in comparisons
        ]
    return by_column(cells)


def _checks(noisy: Sequence[NoiseRecord]) -> Table:
    checks = [(record, check) for record in noisy for check in record.checks]
    return by_column(
        {
            "comparison": [f"{record.kind}, {_name(record)}" for record, _ in checks],
            "tokens": [f"{check.low}–{check.high}" for _, check in checks],
            "responses": [str(check.responses) for _, check in checks],
            "predicted": [f"{check.predicted:.1%}" for _, check in checks],
            "measured": [both(check.measured, ".1%") for _, check in checks],
        }
    )


def _name(record: NoiseRecord) -> str:
    """Return its precision, and whether that is emulated."""
    return f"{record.precision} (emulated)" if record.emulated else record.precision


def both(figure: Interval, form: str = ".2g") -> str:
    """Format a figure with its interval; a 0 has none."""
    return with_interval(*figure, form) if figure[0] else number(figure[0], form)


def write_page(calibration: Calibration, path: Path) -> None:
    """Write the calibration as an HTML file."""
    figures = {}
    if noisy := _noisy(calibration):
        in_s = [record for record in noisy if record.kind in ("sampler", "updates")]
        passes = [record for record in noisy if record.kind in ("sampler", "precision")]
        figures["rates"] = _rates(in_s)
        figures["spread"] = _spread(passes, calibration.max_response_tokens)
    template = Path(__file__).with_name("page.html")
    content = {"comparisons": _comparisons(calibration), "checks": _checks(noisy), "both": both}
    path.write_text(render_page(template, figures, calibration=calibration, **content), encoding="utf-8")


def _rates(noisy: Sequence[NoiseRecord]) -> Spec:
    """Return the share outside the band by noise alone, with its interval."""
    lines = []
    for record, colour in zip(noisy, _COLOURS, strict=False):
        y, low, high = (np.array([at.clip_rate[i] or 0.0 for at in record.by_length]) for i in range(3))
        at = np.array([at.length for at in record.by_length])
        lines.append(Line(label=_label(record), colour=colour, x=at, y=y, low=low, high=high))
    return chart(lines, LENGTH, axis("outside by noise alone", share=True))


def _spread(noisy: Sequence[NoiseRecord], longest: int) -> Spec:
    """Return sigma·√L and |drift|·L against length: they cross at the drift length."""
    at, lines = np.array(lengths_up_to(longest)), []
    for record, colour in zip(noisy, _COLOURS, strict=False):
        for name, y in (
            ("spread", (record.sigma[0] or 0.0) * at**0.5),
            ("drift", abs(record.drift[0] or 0.0) * at),
        ):
            label = f"{name}, {_label(record)}"
            lines.append(Line(label=label, colour=colour, x=at, y=y, dashed=name == "drift"))
    return chart(lines, LENGTH, {"title": "nats", "scale": {"type": "log"}})


def _label(record: NoiseRecord) -> str:
    return f"{record.kind}, {record.precision}{'*' if record.emulated else ''}"
