"""``report/index.html`` of a run: one file with everything in it, for the engineer who reads it afterwards.

Numbers come from ``figures``, drawings from ``pictures``, and the sentences about them from ``page.html``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.report import pictures
from megatron_fspo.lab.report.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, Line, smoothing_window
from megatron_fspo.lab.report.figures import TAIL, WINDOW, RunData, band_at_end, facts, headlines, phases
from megatron_fspo.lab.report.history import History, Records, clip_rates, overall_rates, read_records
from megatron_fspo.lab.report.html import render_page
from megatron_fspo.lab.report.samples import before_after
from megatron_fspo.objective import ClipBand
from megatron_fspo.record.rows import ROUTERS, rows_from_end

_NEWEST = 100
"""Rows of metrics in which the band that trackers draw is looked for."""
_CURVES = (
    ("clip_rate", "fspo/out_of_band", "outside", BLUE, "-"),
    ("clip_rate", "fspo/clip_low", "clipped low", ORANGE, "-"),
    ("clip_rate", "fspo/clip_high", "high", PURPLE, "-"),
    ("clip_rate", "fspo/dual_clip_frac", "dual", GREEN, "-"),
    ("clip_rate", "fspo/noise_clip_rate", "noise", GREY, "--"),
    ("length_error", "fspo/lre_max", "max", ORANGE, "-"),
    ("length_error", "fspo/lre_mean", "mean", BLUE, "-"),
    ("length_error", "fspo/lre_null", "by chance", GREY, "--"),
    ("spread", "fspo/sigma_hat", "σ̂", BLUE, "-"),
    ("spread", "fspo/c_low", "c low", ORANGE, "--"),
    ("spread", "fspo/c_high", "c high", PURPLE, ":"),
    ("kl", "fspo/kl_k3", "", BLUE, "-"),
    ("entropy", "actor/entropy", "", GREEN, "-"),
    ("grad_norm", "actor/grad_norm/max", "max of step", ORANGE, "-"),
    ("grad_norm", "actor/grad_norm", "mean", BLUE, "-"),
    ("exponent", "fspo/exponent_fit", "fitted", BLUE, "-"),
    ("exponent", "fspo/exponent", "of the band", ORANGE, "-"),
    ("router_load", "router/load_max", "worst layer", ORANGE, "-"),
    ("router_load", "router/load_max/mean", "mean of layers", BLUE, "-"),
    ("router_entropy", "router/entropy", "", GREEN, "-"),
    ("turns", "environment/turns/mean", "mean", BLUE, "-"),
    ("turns", "environment/turns/max", "most", GREY, "--"),
    ("tool_failures", "environment/failed", "", ORANGE, "-"),
    ("tool_seconds", "perf/environment_seconds/mean", "mean", BLUE, "-"),
    ("tool_seconds", "perf/environment_seconds/max", "most", GREY, "--"),
    ("route_flips", "actor/route_flips", "update", BLUE, "-"),
    ("route_flips", "rollout/route_flips", "old pass", ORANGE, "-"),
)
"""Picture, metric, label, colour and style of each line."""
_SETTINGS = {"fspo/c_low", "fspo/c_high", "fspo/exponent"}
_SMALL = {
    "spread": "nats per √token",
    "kl": "nats per token",
    "entropy": "nats per token",
    "grad_norm": "L2 norm",
    "turns": "turns",
    "tool_failures": "share of answers",
    "tool_seconds": "s for each trajectory",
    "router_load": "times the even load",
    "router_entropy": "nats per token and layer",
    "route_flips": "share of (token, layer)",
}
"""Small picture → unit."""


def write_report(folder: Path) -> Path:
    """Write ``report/index.html`` into a run's folder, and return its path; errors: :func:`render_report`."""
    text, page = render_report(folder), folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return page


def render_report(folder: Path) -> str:
    """Return the page, from what a run has left in its folder so far.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """
    data = RunData(folder)
    tail, last, band = data.records.tail(TAIL, WINDOW), data.records.tail(0.0, 1), data.band()
    svgs = _learning(data.history) | _metrics(data)
    if load := next(rows_from_end(folder / ROUTERS), None):
        svgs["expert_load"] = pictures.expert_load(np.array(load["load"]))
    svgs |= _by_length(tail, last, band) if len(last) else {}
    return render_page(
        Path(__file__).with_name("page.html"),
        svgs,
        data=data,
        config=data.config,
        facts=facts(data),
        spans=(_span(data.steps[:WINDOW]), _span(data.steps[-WINDOW:])),
        headlines=list(headlines(data)),
        smoothing=smoothing_window(len(data.steps)),
        tail=tail,
        by_length=clip_rates(tail) if len(tail) else [],
        last=last,
        beyond=np.sort(np.abs(last.log_ratio_sum[pictures.beyond(last, band)])),
        phases=phases(data.history),
        pairs=before_after(data.samples),
        config_text=(folder / "config.toml").read_text(encoding="utf-8"),
    )


def fairness_pictures(folder: Path) -> dict[str, str]:
    """Name → the text of an ``<svg>``: rates by length, and S against √L, of a run as it is now; none of one
    without records."""
    records = read_records(folder)
    if not len(records):
        return {}
    band = band_at_end(load_config(folder / "config.toml"), History(folder, newest=_NEWEST))
    return _by_length(records.tail(TAIL, WINDOW), records.tail(0.0, 1), band)


def _by_length(tail: Records, last: Records, band: ClipBand | None) -> dict[str, str]:
    labels = {"length": "response length L (tokens)"}
    if tail.turns.max() > 1:
        labels["turns"] = "turns of the trajectory"
    rates = {
        f"rates_by_{by}": pictures.rates_by(clip_rates(tail, by), overall_rates(tail), label)
        for by, label in labels.items()
    }
    return {**rates, "scatter": pictures.scatter(last, band)}


def _span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _learning(history: History) -> dict[str, str]:
    rewards = [Line(series=history.series("critic/rewards/mean"), label="training", colour=BLUE)]
    if accuracy := history.evaluation():
        label = f"evaluation, {accuracy.rsplit('/', 1)[-1]}"
        rewards.append(Line(series=history.series(accuracy), label=label, colour=ORANGE, marker="D"))
    svgs = {"reward": pictures.curves(rewards, "reward")}
    lengths = [history.series(f"response_length/{name}") for name in ("mean", "min", "max", "clip_ratio")]
    if lengths[0]:
        svgs["response_length"] = pictures.response_length(*lengths)
    return svgs


def _metrics(data: RunData) -> dict[str, str]:
    """Return the pictures of ``_CURVES``, as far as the run has their metrics."""
    lines: dict[str, list[Line]] = {}
    for picture, metric, label, colour, style in _CURVES:
        if series := data.history.series(metric):
            line = Line(series=series, label=label, colour=colour, style=style, held=metric in _SETTINGS)
            lines.setdefault(picture, []).append(line)
    svgs = {name: pictures.small(lines[name], unit) for name, unit in _SMALL.items() if name in lines}
    if "clip_rate" in lines:
        svgs["clip_rate"] = pictures.curves(lines["clip_rate"], "share", share=True)
    if "length_error" in lines:
        svgs["length_error"] = pictures.length_error(lines["length_error"], data.lre)
    if "exponent" in lines:
        measured = None if isinstance(data.exponent, str) else data.exponent
        svgs["exponent"] = pictures.exponent(lines["exponent"], measured)
    return svgs
