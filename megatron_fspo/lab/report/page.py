"""``report/index.html`` of a run: one file with everything in it, for the engineer who reads it afterwards.

Numbers come from ``figures``, drawings from ``pictures``, and the sentences about them from ``page.html``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.report import pictures
from megatron_fspo.lab.report.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    STEP,
    Level,
    Line,
    Spec,
    as_svg,
    axis,
    chart,
)
from megatron_fspo.lab.report.figures import (
    TAIL,
    WINDOW,
    RunData,
    band_at_end,
    changed_keys,
    facts,
    headlines,
    phases,
)
from megatron_fspo.lab.report.history import History, Records, clip_rates, overall_rates, read_records
from megatron_fspo.lab.report.html import render_page
from megatron_fspo.lab.report.samples import browsed
from megatron_fspo.objective import ClipBand
from megatron_fspo.record.rows import ROUTERS, rows_from_end

_NEWEST = 100
"""Rows of metrics in which the band that trackers draw is looked for."""
_CURVES = (
    ("clip_rate", "fspo/out_of_band", "outside", BLUE, False),
    ("clip_rate", "fspo/clip_low", "clipped low", ORANGE, False),
    ("clip_rate", "fspo/clip_high", "high", PURPLE, False),
    ("clip_rate", "fspo/dual_clip_frac", "dual", GREEN, False),
    ("clip_rate", "fspo/noise_clip_rate", "noise", GREY, True),
    ("length_error", "fspo/lre_max", "max", ORANGE, False),
    ("length_error", "fspo/lre_mean", "mean", BLUE, False),
    ("length_error", "fspo/lre_null", "by chance", GREY, True),
    ("spread", "fspo/sigma_hat", "σ̂", BLUE, False),
    ("spread", "fspo/c_low", "c low", ORANGE, True),
    ("spread", "fspo/c_high", "c high", PURPLE, True),
    ("kl", "fspo/kl_k3", "", BLUE, False),
    ("entropy", "actor/entropy", "", GREEN, False),
    ("grad_norm", "actor/grad_norm/max", "max of step", ORANGE, False),
    ("grad_norm", "actor/grad_norm", "mean", BLUE, False),
    ("exponent", "fspo/exponent_fit", "fitted", BLUE, False),
    ("exponent", "fspo/exponent", "of the band", ORANGE, False),
    ("router_load", "router/load_max", "worst layer", ORANGE, False),
    ("router_load", "router/load_max/mean", "mean of layers", BLUE, False),
    ("router_entropy", "router/entropy", "", GREEN, False),
    ("turns", "environment/turns/mean", "mean", BLUE, False),
    ("turns", "environment/turns/max", "most", GREY, True),
    ("tool_failures", "environment/failed", "", ORANGE, False),
    ("tool_seconds", "perf/environment_seconds/mean", "mean", BLUE, False),
    ("tool_seconds", "perf/environment_seconds/max", "most", GREY, True),
    ("route_flips", "actor/route_flips", "update", BLUE, False),
    ("memory", "perf/gpu_memory_used", "on the GPU", BLUE, False),
    ("memory", "perf/gpu_memory_peak", "tensors, peak", ORANGE, False),
    ("memory", "perf/cpu_memory", "of a process", GREY, False),
    ("gpu", "perf/gpu_utilization", "", BLUE, False),
    ("speed", "perf/throughput", "", BLUE, False),
    ("cut", "response_length/clip_ratio", "", ORANGE, False),
    ("route_flips", "rollout/route_flips", "old pass", ORANGE, False),
)
"""Picture, metric, label and colour of each line, and whether it is dashed."""
_SIGNED = {
    "length": "between lengths",
    "within_sign": "between lengths, among responses whose advantages have one sign",
    "within_update": "between lengths, within one optimizer step of a rollout",
    "sign": "between positive and negative advantages",
    "update": "between the optimizer steps of a rollout",
}
_SETTINGS = {"fspo/c_low", "fspo/c_high", "fspo/exponent"}
_SHARES = {"clip_rate", "gpu", "cut", "tool_failures"}
_AXES = {
    "clip_rate": "share",
    "length_error": "LRE",
    "exponent": "a",
    "memory": "GiB, the largest of any rank",
    "gpu": "share of the time",
    "speed": "tokens/s",
    "cut": "share of responses",
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
"""Picture → unit."""


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
    figures = _learning(data.history) | _metrics(data)
    if load := next(rows_from_end(folder / ROUTERS), None):
        figures["expert_load"] = pictures.expert_load(np.array(load["load"]))
    figures |= _by_length(tail, last, band) if len(last) else {}
    window = min(WINDOW, len(data.steps) // 2 or 1)
    return render_page(
        Path(__file__).with_name("page.html"),
        figures,
        data=data,
        config=data.config,
        facts=facts(data),
        changed=changed_keys(data.config),
        spans=(_span(data.steps[:window]), _span(data.steps[-window:])),
        headlines=list(headlines(data, window)),
        smoothing=smoothing(len(data.steps)),
        tail=tail,
        by_length=clip_rates(tail) if len(tail) else [],
        last=last,
        beyond=np.sort(np.abs(last.log_ratio_sum[pictures.beyond(last, band)])),
        phases=phases(data.history),
        signed=[(words, data.signed[name]) for name, words in _SIGNED.items()] if math.isfinite(data.lre.mean) else [],
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
    band = band_at_end(load_config(folder / "config.toml"), History(folder, newest=_NEWEST))
    figures = _by_length(records.tail(TAIL, WINDOW), records.tail(0.0, 1), band)
    return {name: as_svg(figure) for name, figure in figures.items()}


def _by_length(tail: Records, last: Records, band: ClipBand | None) -> dict[str, Spec]:
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


def _learning(history: History) -> dict[str, Spec]:
    rewards = [rewards_of(history, label="training", colour=BLUE)]
    if accuracy := history.evaluation():
        label = f"evaluation, {accuracy.rsplit('/', 1)[-1]}"
        rewards.append(accuracies(history, label=label, colour=ORANGE))
    figures = {"reward": chart(rewards, STEP, axis("reward"))}
    mean, low, high = (history.series(f"response_length/{name}") for name in ("mean", "min", "max"))
    if mean:
        line = Line.over_steps(mean, (low, high), label="mean; from the shortest to the longest", colour=BLUE)
        figures["response_length"] = chart([line], STEP, axis("L (tokens)", zero=True))
    return figures


def rewards_of(history: History, **style: Any) -> Line:
    """Return the reward of training over the steps, with its 95% interval over prompts."""
    mean, low, high = (history.series(f"critic/rewards/mean{end}") for end in ("", "/low", "/high"))
    return Line.over_steps(mean, (low, high), **style)


def accuracies(history: History, **style: Any) -> Line:
    """Return accuracy on the first set of prompts, with its 95% interval over prompts."""
    mean, low, high = (history.series(f"{history.evaluation()}{end}") for end in ("", "/low", "/high"))
    return Line.over_steps(mean, (low, high), smoothed=False, **style)


def _metrics(data: RunData) -> dict[str, Spec]:
    """Return the pictures of ``_CURVES``, as far as the run has their metrics."""
    lines: dict[str, list[Line]] = {}
    for picture, metric, label, colour, dashed in _CURVES:
        if series := data.history.series(metric):
            line = Line.over_steps(series, label=label, colour=colour, dashed=dashed, held=metric in _SETTINGS)
            lines.setdefault(picture, []).append(line)
    levels: dict[str, list[Level]] = {}
    if math.isfinite(data.lre.mean):
        levels["length_error"] = pictures.pooled(data.lre, GREEN)
    if not isinstance(data.exponent, str):
        low, high = data.exponent.interval
        levels["exponent"] = [Level(value=data.exponent.value, low=low, high=high, colour=GREEN, dashed=False)]
    return {
        name: chart(
            of_picture,
            STEP,
            axis(_AXES[name], share=name in _SHARES, zero=name == "length_error"),
            levels=levels.get(name, ()),
        )
        for name, of_picture in lines.items()
    }
