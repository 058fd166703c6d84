"""``report/index.html`` of a run: one file with everything in it, for the engineer who reads it afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup
from pydantic import BaseModel

from megatron_fspo import __version__
from megatron_fspo.config import Config, DAPOLoss, FSPOLoss, GRPOLoss, GSPOLoss, RLOOLoss
from megatron_fspo.objective import ClipBand, FSPOBand, GSPOBand, LengthReweightingError, RLOOBand
from megatron_fspo.options import load_config
from megatron_fspo.trainer import pictures
from megatron_fspo.trainer.history import (
    History,
    Records,
    Series,
    clip_rates,
    overall_rates,
    pooled_lre,
    read_records,
)
from megatron_fspo.trainer.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, Line

_WINDOW = 5
"""Steps behind each number of the table."""
_TAIL = 0.25
"""Share of the steps, the last ones, in the picture of clip rates by length."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the table of numbers."""

    name: str
    first: str
    last: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture with the sentence that says what to look for."""

    title: str
    look_for: str
    svg: str
    small: bool = False


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that the page is made of."""

    config: Config
    history: History
    records: Records
    lre: LengthReweightingError
    """Pooled over ``records``."""

    @property
    def token_level(self) -> bool:
        return isinstance(self.config.loss, GRPOLoss | DAPOLoss)


def write_report(folder: Path) -> Path:
    """Draw ``report/index.html`` from what a run left in its folder, and return its path.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """
    history = History(folder)
    records = read_records(folder)
    found = Findings(
        config=load_config(folder / "config.toml"), history=history, records=records, lre=pooled_lre(records)
    )
    page = folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(_render(found, config_text=(folder / "config.toml").read_text("utf-8")), encoding="utf-8")
    return page


def _render(found: Findings, config_text: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    steps = found.history.series("critic/rewards/mean").steps
    window = min(_WINDOW, len(steps))
    return environment.get_template("report.html").render(
        name=found.config.run.name,
        loss=found.config.loss.name,
        facts=facts(found),
        spans=(_span(steps[:window].tolist()), _span(steps[len(steps) - window :].tolist())),
        headlines=list(headlines(found)),
        figures=list(figures(found)),
        silence=_silence(found),
        smoothing=pictures.smoothing_window(len(steps)),
        config_text=config_text,
        version=__version__,
        svg=Markup,
    )


def facts(found: Findings) -> dict[str, str]:
    """What was run."""
    config, loss = found.config, found.config.loss
    c_low, c_high = (found.history.series(f"fspo/c_{side}") for side in ("low", "high"))
    band = f"; at the end c = {c_low.last(1):.4g} (low), {c_high.last(1):.4g} (high)" if c_low and c_high else ""
    samples = config.rollout.prompts * config.rollout.samples
    return {
        "Loss": f"{loss.name}: {_keys(loss)}{band}",
        "Model": f"{config.model.checkpoint}, {config.model.dtype}",
        "Layout": _keys(config.parallel),
        "Batch": f"{config.rollout.prompts} prompts × {config.rollout.samples} samples = {samples} responses "
        f"a step, learned from in {config.batch.mini_batches} mini-batches × {config.batch.epochs} epochs",
        "Optimizer": f"lr = {config.optimizer.lr:g}, clip_grad = {config.optimizer.clip_grad:g}",
        "Data": f"{config.data.train}, reward {config.reward.name}, seed {config.run.seed}",
    }


def headlines(found: Findings) -> Iterator[Headline]:
    """The numbers that sum up the run: means over the first and the last steps."""
    history = found.history
    yield _trend("Reward", history.series("critic/rewards/mean"), ".3f")
    accuracy = history.evaluation()
    if accuracy:
        scores = history.series(accuracy)
        yield Headline(
            name="Evaluation",
            first=_number(scores.first(1), ".3f"),
            last=_number(scores.last(1), ".3f"),
            note=f"{accuracy.removeprefix('val/')}, at step {scores.steps[0]} and step {scores.steps[-1]}",
        )
    yield _trend("Response length", history.series("response_length/mean"), ",.1f", "tokens")
    out_of_band, clipped = history.series("fspo/out_of_band"), history.series("actor/pg_clipfrac")
    if out_of_band:
        what = "sequences with a token outside the band" if found.token_level else "sequences, either side"
        yield _trend("Outside the band", out_of_band, ".1%", what)
        what = "tokens" if found.token_level else "sequences"
        yield _trend("Clip rate", clipped, ".1%", f"{what} whose gradient the band removed")
        yield _trend("LRE (mean)", history.series("fspo/lre_mean"), ".3f", "of single steps")
        yield _trend("LRE by chance", history.series("fspo/lre_null"), ".3f", "null floor of single steps")
    if math.isfinite(found.lre.mean):
        low, high = found.lre.mean_interval
        yield Headline(
            name="LRE pooled",
            first="",
            last=f"{found.lre.mean:.3f}",
            note=f"95% interval {low:.3f} to {high:.3f}; null floor {found.lre.null_mean:.3f}; "
            f"{len(found.records):,} records of all steps",
        )
    mismatch = history.series("rollout/logprob_abs_diff/mean")
    if mismatch:
        yield _trend("Sampler against trainer", mismatch, ".1e", "mean |Δ log p| per token, nats")
    yield Headline(
        name="Dropped sequences",
        first="",
        last=f"{history.series('fspo/nonfinite').total():.0f}",
        note="not finite, over the whole run",
    )
    yield _trend("Throughput", history.series("perf/throughput"), ",.0f", "tokens/s, prompts included")
    steps, seconds = history.series("critic/rewards/mean").steps, history.series("timing_s/step").total()
    yield Headline(
        name="Steps",
        first="",
        last=f"{len(steps)} of {found.config.run.steps}",
        note=f"{_duration(seconds)}, without evaluations and checkpoints",
    )


def figures(found: Findings) -> Iterator[Figure]:
    """The pictures the run has the numbers for."""
    yield from _learning(found.history)
    yield from _fairness(found)
    yield from _health(found.history)


def _learning(history: History) -> Iterator[Figure]:
    rewards, accuracy = history.series("critic/rewards/mean"), history.evaluation()
    evaluation = None
    if accuracy:
        label = f"evaluation, {accuracy.rsplit('/', 1)[-1]}"
        evaluation = Line(series=history.series(accuracy), label=label, colour=ORANGE, marker="D")
    yield Figure(
        title="Reward",
        look_for="Training reward and held-out accuracy should rise together; a growing gap between their "
        "trends is memorising or reward hacking.",
        svg=pictures.reward(Line(series=rewards, label="training", colour=BLUE), evaluation),
    )
    length = [history.series(f"response_length/{part}") for part in ("mean", "min", "max", "clip_ratio")]
    if length[0]:
        yield Figure(
            title="Response length",
            look_for="A mean that runs away while the reward stands still is a length explosion; responses "
            "cut at the limit (lower panel) earn their reward unfinished.",
            svg=pictures.response_length(*length),
        )


def _fairness(found: Findings) -> Iterator[Figure]:
    history, records = found.history, found.records
    rates = [
        Line(series=series, label=label, colour=colour)
        for name, label, colour in (
            ("out_of_band", "outside the band", BLUE),
            ("clip_low", "clipped low", ORANGE),
            ("clip_high", "clipped high", PURPLE),
            ("dual_clip_frac", "dual clip", GREEN),
        )
        if (series := history.series(f"fspo/{name}"))
    ]
    if rates:
        yield Figure(
            title="Clip rate",
            look_for="Level is healthy; a rise towards 100% means steps too large for the band, and low and "
            f"high far apart mean that one sign of the advantage is hardly learned from. {_unit(found)}",
            svg=pictures.clip_rate(rates),
        )
    if len(records):
        tail = records.tail(_TAIL, _WINDOW)
        yield Figure(
            title="Clip rate by length",
            look_for="Flat is fair: bins that leave the dashed overall rate by more than their bars (95%, as "
            "if records were independent) are lengths that the clip favours or punishes. "
            f"{len(tail):,} records of steps {tail.step.min()} to {tail.step.max()}.",
            svg=pictures.rates_by_length(clip_rates(tail), overall_rates(tail)),
        )
    lines = [
        Line(series=series, label=label, colour=colour, style=style)
        for name, label, colour, style in (
            ("lre_max", "max", ORANGE, "-"),
            ("lre_mean", "mean", BLUE, "-"),
            ("lre_null", "by chance", GREY, "--"),
        )
        if (series := history.series(f"fspo/{name}"))
    ]
    if lines:
        yield Figure(
            title="Length Reweighting Error",
            look_for="Mean at the dashed null floor: clipping is as neutral to length as chance allows. "
            f"{_pooled_sentence(found)} LRE falls with the clip rate, so compare runs at equal clip rates only.",
            svg=pictures.length_error(lines, found.lre),
        )
    if len(records):
        last = records.tail(0.0, 1)
        band = _band(found)
        yield Figure(
            title="S against √L",
            look_for=_scatter_sentence(found, last, band),
            svg=pictures.scatter(last.thinned(4000), band),
        )


def _health(history: History) -> Iterator[Figure]:
    for title, unit, look_for, lines in (
        (
            "Noise σ̂ and width c",
            "nats per √token",
            "c near 2σ̂ clips the tails; σ̂ that climbs past c means steps too large for the band.",
            (("sigma_hat", "σ̂", BLUE, "-"), ("c_low", "c low", ORANGE, "--"), ("c_high", "c high", PURPLE, ":")),
        ),
        (
            "KL to the rollout policy",
            "nats per token",
            "How far the policy moves on one rollout (k3 estimate); it should stay level.",
            (("kl_k3", "k3", BLUE, "-"),),
        ),
        (
            "Entropy",
            "nats per token",
            "A fall towards 0 is collapse: nothing is left to explore.",
            (("actor/entropy", "", GREEN, "-"),),
        ),
        (
            "Gradient norm",
            "before clipping",
            "Single spikes are clipped away; a rising floor comes before divergence.",
            (("actor/grad_norm/max", "max of step", ORANGE, "-"), ("actor/grad_norm", "mean", BLUE, "-")),
        ),
    ):
        drawn = [
            Line(series=series, label=label, colour=colour, style=style)
            for name, label, colour, style in lines
            if (series := history.series(name if "/" in name else f"fspo/{name}"))
        ]
        if drawn:
            yield Figure(title=title, look_for=look_for, svg=pictures.small(drawn, unit), small=True)


def _band(found: Findings) -> ClipBand | None:
    """The band at the end of the run; None for token-level losses, which have none on S."""
    loss, history = found.config.loss, found.history
    if isinstance(loss, FSPOLoss):
        c_low, c_high, drift = (history.series(f"fspo/{key}").last(1) for key in ("c_low", "c_high", "drift"))
        if not (c_low > 0 and c_high > 0 and math.isfinite(drift)):
            return None
        return FSPOBand(c_low=c_low, c_high=c_high, drift=drift, exponent=loss.exponent)
    if isinstance(loss, RLOOLoss):
        return RLOOBand(eps_low=loss.eps_low, eps_high=loss.eps_high)
    if isinstance(loss, GSPOLoss):
        return GSPOBand(eps_low=loss.eps_low, eps_high=loss.eps_high)
    return None


def _unit(found: Findings) -> str:
    if not found.token_level:
        return ""
    return "With this loss a sequence is outside if one token is; clipped are shares of tokens."


def _pooled_sentence(found: Findings) -> str:
    lre = found.lre
    if not math.isfinite(lre.mean):
        return ""
    low, high = lre.mean_interval
    return (
        f"Over all {len(found.records):,} records it is {lre.mean:.3f} (95% interval {low:.3f} to {high:.3f}, "
        f"green) against {lre.null_mean:.3f} by chance."
    )


def _scatter_sentence(found: Findings, last: Records, band: ClipBand | None) -> str:
    limit = pictures.scatter_limit(last, band)
    outside = abs(last.log_ratio_sum) > limit
    text = f"Step {last.step[0]}, {len(last):,} records. "
    if found.token_level:
        text += "Each token has a band of its own, so there is none on S. "
    else:
        text += "The cloud should widen as the band (black) does; outside it a sequence is kept when moving "
        text += "back is what its advantage asks for. "
    if outside.any():
        farthest = last.log_ratio_sum[abs(last.log_ratio_sum).argmax()]
        text += f"{outside.sum()} lie beyond the picture (triangles), the farthest at S = {_signed(farthest)} nats."
    return text


def _silence(found: Findings) -> str:
    """Why there are no pictures of clipping, if there are none."""
    batch = found.config.batch
    if batch.mini_batches * batch.epochs == 1:
        return (
            "This run made one optimizer step per rollout (batch.mini_batches × batch.epochs = 1): new and "
            "old policy are the same there, S = 0, and there is nothing to clip."
        )
    if not len(found.records):
        return (
            "The run kept no sequences (log.sequences = 0, or it stopped before its second optimizer step), "
            "so the pictures by length are missing."
        )
    return ""


def _trend(name: str, series: Series, form: str, note: str = "") -> Headline:
    first, last = series.first(_WINDOW), series.last(_WINDOW)
    return Headline(name=name, first=_number(first, form), last=_number(last, form), note=note)


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "–"


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _keys(section: BaseModel) -> str:
    values = section.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
