"""``report/index.html`` of a run: one file with everything in it, for the engineer who reads it afterwards.

Numbers come from ``figures``, drawings from ``charts``, and the sentences about them from ``page.html``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fspo.config.loading import load_config
from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.lab.report import charts, figures, pictures
from megatron_fspo.lab.report.charts import BLUE, STEP, Line, Spec, axis, chart
from megatron_fspo.lab.report.figures import TAIL, WINDOW, RunData
from megatron_fspo.lab.report.history import History, Records, clip_rates, overall_rates, read_records
from megatron_fspo.lab.report.html import render_page
from megatron_fspo.lab.report.samples import browsed
from megatron_fspo.objective import ClipBand
from megatron_fspo.record.rows import ROUTERS, rows_from_end

_CURVES = {
    "clip_rate": "share; fspo/out_of_band outside, fspo/clip_low clipped low, fspo/clip_high clipped high, "
    "fspo/dual_clip_frac dual clip, fspo/noise_clip_rate expected of noise",
    "length_error": "LRE; fspo/lre_mean mean, fspo/lre_max max, fspo/lre_null by chance",
    "exponent": "a; fspo/exponent_fit fitted, fspo/exponent of the band",
    "spread": "nats per √token; fspo/sigma_hat σ̂, fspo/c_low c low, fspo/c_high c high",
    "kl": "nats per token; fspo/kl_k3",
    "entropy": "nats per token; actor/entropy",
    "grad_norm": "L2 norm; actor/grad_norm mean, actor/grad_norm/max max of step",
    "cut": "share of responses; response_length/clip_ratio",
    "speed": "tokens/s; perf/throughput",
    "memory": "GiB; perf/cpu_memory process, perf/gpu_memory_used GPU, perf/gpu_memory_peak tensors on it",
    "gpu": "share of the time; perf/gpu_utilization",
    "turns": "turns; environment/turns/mean mean, environment/turns/max most",
    "tool_failures": "share of answers; environment/failed",
    "tool_seconds": "s; perf/environment_seconds/mean mean, perf/environment_seconds/max most",
    "router_load": "times the even load; router/load_max/mean mean of layers, router/load_max worst layer",
    "router_entropy": "nats per token and layer; router/entropy",
    "route_flips": "share of (token, layer); actor/route_flips update, rollout/route_flips old pass",
}
"""Picture → unit; metric and label of each line."""
_SETTINGS = {"fspo/c_low", "fspo/c_high", "fspo/exponent"}
_CHANCE = {"fspo/noise_clip_rate", "fspo/lre_null"}


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
    drawn = _learning(data) | _metrics(data)
    if load := next(rows_from_end(folder / ROUTERS), None):
        drawn["expert_load"] = pictures.expert_load(np.array(load["load"]))
    drawn |= _by_length(tail, last, band) if len(last) else {}
    return render_page(
        Path(__file__).with_name("page.html"),
        drawn,
        data=data,
        config=data.config,
        facts=figures.facts(data),
        changed=figures.changed_keys(data.config),
        window=figures.disjoint(len(data.steps)),
        headlines=list(figures.headlines(data)),
        smoothing=smoothing(len(data.steps)),
        tail=tail,
        by_length=clip_rates(tail) if len(tail) else [],
        last=last,
        phases=figures.phases(data.history),
        samples=browsed(folder, data.samples),
        config_text=(folder / "config.toml").read_text(encoding="utf-8"),
    )


def smoothing(count: int) -> int:
    """Return over how many steps to either side the page smooths a run of so many when it opens."""
    return 0 if count <= 10 else min(30, max(2, count // 80))


def fairness_pictures(folder: Path) -> dict[str, str]:
    """Name → the text of an ``<svg>``: rates by length, and S against √L, of a run as it is now; none of one
    without records."""
    records = read_records(folder)
    if not len(records):
        return {}
    band = figures.band_at_end(load_config(folder / "config.toml"), History(folder, newest=100))
    drawn = _by_length(records.tail(TAIL, WINDOW), records.tail(0.0, 1), band)
    return {name: charts.as_svg(one) for name, one in drawn.items()}


def _by_length(tail: Records, last: Records, band: ClipBand | None) -> dict[str, Spec]:
    labels = {"length": "response length L (tokens)"}
    if tail.turns.max() > 1:
        labels["turns"] = "turns of the trajectory"
    rates = {
        f"rates_by_{by}": pictures.rates_by(clip_rates(tail, by), overall_rates(tail), label)
        for by, label in labels.items()
    }
    return {**rates, "scatter": pictures.scatter(last, band)}


def with_ends(history: History, name: str, **style: Any) -> Line:
    """Return a metric over the steps, with the 95% interval over prompts that the run logged."""
    return Line.over_steps(*(history.series(f"{name}{end}") for end in ("", "/low", "/high")), **style)


def _learning(data: RunData) -> dict[str, Spec]:
    history = data.history
    curves = [with_ends(history, figures.LEARNED[data.learned], label="training", colour=BLUE)]
    if accuracy := history.evaluation():
        label = f"evaluation, {accuracy.rsplit('/', 1)[-1]}"
        curves.append(with_ends(history, accuracy, label=label, colour=charts.ORANGE, kind=charts.PLAIN))
    drawn = {data.learned: chart(curves, STEP, axis(data.learned))}
    lengths = [history.series(f"response_length/{name}") for name in ("mean", "min", "max")]
    if lengths[0]:
        line = Line.over_steps(*lengths, label="mean; from the shortest to the longest", colour=BLUE)
        drawn["response_length"] = chart([line], STEP, axis("L (tokens)", zero=True))
    return drawn


def _metrics(data: RunData) -> dict[str, Spec]:
    """Return the pictures of ``_CURVES``, as far as the run has their metrics."""
    levels, found = {}, {}
    if math.isfinite(data.lre.mean):
        levels["length_error"] = pictures.pooled(data.lre)
    if not isinstance(data.exponent, str):
        low, high = data.exponent.interval
        levels["exponent"] = [(charts.GREEN, Estimate(value=data.exponent.value, low=low, high=high))]
    for picture, words in _CURVES.items():
        unit, _, metrics = words.partition("; ")
        lines = []
        for metric, colour in zip(metrics.split(", "), charts.COLOURS, strict=False):
            name, _, label = metric.partition(" ")
            kind = charts.HELD if name in _SETTINGS else charts.SMOOTHED
            style = {"label": label, "dashed": name in _SETTINGS | _CHANCE, "kind": kind}
            style["colour"] = charts.GREY if name in _CHANCE else colour
            if series := data.history.series(name):
                lines.append(Line.over_steps(series, **style))
        if lines:
            y = axis(unit, share=unit.startswith("share"), zero=picture == "length_error")
            found[picture] = chart(lines, STEP, y, levels.get(picture, ()))
    return found
