"""``report/index.html`` of a run: one file with everything in it, for the engineer who reads it afterwards.

Numbers come from ``figures``, drawings from ``pictures``, and the sentences about them from ``page.html``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup

from megatron_fspo import __version__
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.report import pictures
from megatron_fspo.lab.report.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, Line, smoothing_window
from megatron_fspo.lab.report.figures import (
    TAIL,
    WINDOW,
    RunData,
    band_at_end,
    facts,
    headlines,
    phases,
    read_run,
)
from megatron_fspo.lab.report.history import History, Records, clip_rates, overall_rates, read_records
from megatron_fspo.lab.report.samples import before_after
from megatron_fspo.objective import ClipBand

_NEWEST = 100
"""Rows of metrics in which the band that trackers draw is looked for."""


def write_report(folder: Path) -> Path:
    """Draw ``report/index.html`` from what a run left in its folder, and return its path.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """
    data = read_run(folder)
    config_text = (folder / "config.toml").read_text(encoding="utf-8")
    page = folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(_render(data, config_text), encoding="utf-8")
    return page


def fairness_pictures(folder: Path) -> dict[str, str]:
    """Name → the text of an ``<svg>``: rates by length, and S against √L, of a run as it is now; none of one
    without records."""
    records = read_records(folder)
    if not len(records):
        return {}
    band = band_at_end(load_config(folder / "config.toml"), History(folder, newest=_NEWEST))
    return _by_length(records.tail(TAIL, WINDOW), records.tail(0.0, 1), band)


def _by_length(tail: Records, last: Records, band: ClipBand | None) -> dict[str, str]:
    return {
        "rates_by_length": pictures.rates_by_length(clip_rates(tail), overall_rates(tail)),
        "scatter": pictures.scatter(last, band),
    }


def _render(data: RunData, config_text: str) -> str:
    tail, last, band = data.records.tail(TAIL, WINDOW), data.records.tail(0.0, 1), data.band()
    svgs = _learning(data.history) | _clipping(data, tail, last, band) | _health(data)
    return template(Path(__file__).with_name("page.html")).render(
        data=data,
        config=data.config,
        facts=facts(data),
        spans=(_span(data.steps[:WINDOW]), _span(data.steps[-WINDOW:])),
        headlines=list(headlines(data)),
        # Ours, and without any text of the user's: the only thing here that is not escaped.
        svgs={name: Markup(svg) for name, svg in svgs.items()},
        smoothing=smoothing_window(len(data.steps)),
        tail=tail,
        by_length=clip_rates(tail) if len(tail) else [],
        last=last,
        beyond=np.sort(np.abs(last.log_ratio_sum[pictures.beyond(last, band)])),
        phases=phases(data.history),
        answers=before_after(data.samples),
        config_text=config_text,
        version=__version__,
    )


def template(path: Path) -> jinja2.Template:
    """A page, which may include ``style.css``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)


def _span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _learning(history: History) -> dict[str, str]:
    rewards = [Line(series=history.series("critic/rewards/mean"), label="training", colour=BLUE)]
    accuracy = history.evaluation()
    if accuracy:
        label = f"evaluation, {accuracy.rsplit('/', 1)[-1]}"
        rewards.append(Line(series=history.series(accuracy), label=label, colour=ORANGE, marker="D"))
    svgs = {"reward": pictures.curves(rewards, "reward")}
    mean, low, high, cut = (
        history.series(f"response_length/{name}") for name in ("mean", "min", "max", "clip_ratio")
    )
    if mean:
        svgs["response_length"] = pictures.response_length(mean, low, high, cut)
    return svgs


def _clipping(data: RunData, tail: Records, last: Records, band: ClipBand | None) -> dict[str, str]:
    svgs = {}
    rates = _lines(
        data.history,
        ("fspo/out_of_band", "outside", BLUE, "-"),
        ("fspo/clip_low", "clipped low", ORANGE, "-"),
        ("fspo/clip_high", "high", PURPLE, "-"),
        ("fspo/dual_clip_frac", "dual", GREEN, "-"),
        ("fspo/noise_clip_rate", "noise", GREY, "--"),
    )
    if rates:
        svgs["clip_rate"] = pictures.curves(rates, "share", share=True)
    errors = _lines(
        data.history,
        ("fspo/lre_max", "max", ORANGE, "-"),
        ("fspo/lre_mean", "mean", BLUE, "-"),
        ("fspo/lre_null", "by chance", GREY, "--"),
    )
    if errors:
        svgs["length_error"] = pictures.length_error(errors, data.lre)
    return svgs | (_by_length(tail, last, band) if len(last) else {})


def _health(data: RunData) -> dict[str, str]:
    history = data.history
    wanted = {
        "spread": _lines(
            history,
            ("fspo/sigma_hat", "σ̂", BLUE, "-"),
            held=(("fspo/c_low", "c low", ORANGE, "--"), ("fspo/c_high", "c high", PURPLE, ":")),
        ),
        "kl": _lines(history, ("fspo/kl_k3", "", BLUE, "-")),
        "entropy": _lines(history, ("actor/entropy", "", GREEN, "-")),
        "grad_norm": _lines(
            history,
            ("actor/grad_norm/max", "max of step", ORANGE, "-"),
            ("actor/grad_norm", "mean", BLUE, "-"),
        ),
    }
    units = {"spread": "nats per √token", "kl": "nats per token", "entropy": "nats per token"}
    svgs = {
        name: pictures.small(lines, units.get(name, "L2 norm")) for name, lines in wanted.items() if lines
    }
    held = (("fspo/exponent", "of the band", ORANGE, "-"),)
    fits = _lines(history, ("fspo/exponent_fit", "fitted", BLUE, "-"), held=held)
    measured = None if isinstance(data.exponent, str) else data.exponent
    return svgs | ({"exponent": pictures.exponent(fits, measured)} if fits else {})


def _lines(
    history: History, *wanted: tuple[str, str, str, str], held: Sequence[tuple[str, str, str, str]] = ()
) -> list[Line]:
    """(metric, label, colour, style) each, the held ones last; those that the run has."""
    lines = [
        Line(series=history.series(name), label=label, colour=colour, style=style, held=number >= len(wanted))
        for number, (name, label, colour, style) in enumerate((*wanted, *held))
    ]
    return [line for line in lines if line.series]
