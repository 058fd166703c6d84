"""``report/index.html`` of a run: one file with everything in it, for the engineer who reads it afterwards.

Numbers come from ``history``, drawings from ``pictures``, and the sentences about them from ``page.html``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup
from pydantic import BaseModel

from megatron_fspo import __version__
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.losses import FSPOLoss, band_of
from megatron_fspo.objective import ClipBand, FSPOBand, LengthReweightingError
from megatron_fspo.report import pictures
from megatron_fspo.report.history import (
    History,
    Records,
    Series,
    clip_rates,
    overall_rates,
    pooled_lre,
    read_records,
)
from megatron_fspo.report.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, Line

_WINDOW = 5
"""Steps behind each number of the table."""
_TAIL = 0.25
"""Share of the steps, the last ones, in the picture of clip rates by length."""
_POOL = 100_000
"""Records behind the pooled LRE, at most: its 400 resamples take two seconds then."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the table of numbers."""

    name: str
    first: str = ""
    last: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the page is made of."""

    config: Config
    history: History
    records: Records
    pool: Records
    """An even sample of ``records``; all of them where they are not too many."""
    lre: LengthReweightingError
    """Of out-of-band acceptance, over ``pool``."""

    @property
    def token_level(self) -> bool:
        """Clip rates are shares of tokens then, and there is no band on S."""
        return band_of(self.config.loss) is None

    @property
    def steps(self) -> list[int]:
        """The training steps made."""
        steps: list[int] = self.history.series("critic/rewards/mean").steps.tolist()
        return steps

    def band(self) -> ClipBand | None:
        """The band at the end of the run, if there is one on S."""
        return _band(self.config, self.history)


def write_report(folder: Path) -> Path:
    """Draw ``report/index.html`` from what a run left in its folder, and return its path.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """
    history = History(folder)
    config = load_config(folder / "config.toml")
    records = read_records(folder)
    pool = records.thinned(_POOL)
    found = Findings(config=config, history=history, records=records, pool=pool, lre=pooled_lre(pool))
    config_text = (folder / "config.toml").read_text(encoding="utf-8")
    page = folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(_render(found, config_text), encoding="utf-8")
    return page


def fairness_pictures(folder: Path) -> dict[str, str]:
    """Name → the text of an ``<svg>``: rates by length, and S against √L, of a run as it is now; none of one
    without records."""
    records = read_records(folder)
    if not len(records):
        return {}
    band = _band(load_config(folder / "config.toml"), History(folder))
    return _by_length(records.tail(_TAIL, _WINDOW), records.tail(0.0, 1), band)


def _band(config: Config, history: History) -> ClipBand | None:
    loss = config.loss
    if isinstance(loss, FSPOLoss):
        names = ("fspo/c_low", "fspo/c_high", "fspo/drift")
        c_low, c_high, drift = (history.series(name).last(1) for name in names)
        if math.isnan(c_low + c_high + drift):
            return None
        loss = loss.moved(c_low=c_low, c_high=c_high, drift=drift)
    return band_of(loss)


def _by_length(tail: Records, last: Records, band: ClipBand | None) -> dict[str, str]:
    return {
        "rates_by_length": pictures.rates_by_length(clip_rates(tail), overall_rates(tail)),
        "scatter": pictures.scatter(last, band),
    }


def _render(found: Findings, config_text: str) -> str:
    tail, last, band = found.records.tail(_TAIL, _WINDOW), found.records.tail(0.0, 1), found.band()
    svgs = _learning(found.history) | _clipping(found, tail, last, band) | _health(found.history)
    return template(Path(__file__).with_name("page.html")).render(
        found=found,
        config=found.config,
        facts=facts(found),
        spans=(_span(found.steps[:_WINDOW]), _span(found.steps[-_WINDOW:])),
        headlines=list(headlines(found)),
        # Ours, and without any text of the user's: the only thing here that is not escaped.
        svgs={name: Markup(svg) for name, svg in svgs.items()},
        smoothing=pictures.smoothing_window(len(found.steps)),
        tail=tail,
        by_length=clip_rates(tail) if len(tail) else [],
        last=last,
        beyond=np.sort(np.abs(last.log_ratio_sum[pictures.beyond(last, band)])),
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


def facts(found: Findings) -> dict[str, str]:
    """What was run."""
    config, band = found.config, found.band()
    loss = f"{config.loss.name}: {_keys(config.loss)}"
    if isinstance(band, FSPOBand):
        loss += f"; at the end c = {band.c_low:.4g} (low), {band.c_high:.4g} (high)"
    prompts, samples = config.rollout.prompts, config.rollout.samples
    files = ", ".join(str(one.file) for one in config.data.train_sets)
    return {
        "Loss": loss,
        "Model": f"{config.model.checkpoint}, {config.model.dtype}",
        "Layout": _keys(config.parallel),
        "Batch": f"{prompts} prompts × {samples} samples = {prompts * samples} responses a step, learned "
        f"from in {config.batch.mini_batches} mini-batches × {config.batch.epochs} epochs",
        "Optimizer": f"lr = {config.optimizer.lr:g}, clip_grad = {config.optimizer.clip_grad:g}",
        "Data": f"{files}, reward {config.reward.name}, seed {config.run.seed}",
    }


def headlines(found: Findings) -> Iterator[Headline]:
    """The numbers that sum up the run: means over the first and the last steps."""
    series, accuracy = found.history.series, found.history.evaluation()
    yield _trend("Reward", series("critic/rewards/mean"), ".3f")
    if accuracy:
        scores = series(accuracy)
        yield Headline(
            name="Evaluation",
            first=_number(scores.first(1), ".3f"),
            last=_number(scores.last(1), ".3f"),
            note=f"{accuracy.removeprefix('val/')}, at step {scores.steps[0]} and step {scores.steps[-1]}",
        )
    yield _trend("Response length", series("response_length/mean"), ",.1f", "tokens")
    if series("fspo/out_of_band"):
        outside, clipped = "sequences, on either side", "sequences"
        if found.token_level:
            outside, clipped = "sequences with a token outside", "tokens"
        yield _trend("Outside the band", series("fspo/out_of_band"), ".1%", outside)
        if series("fspo/noise_clip_rate"):
            note = "expected of the noise that was measured before the run"
            yield _trend("Outside by noise", series("fspo/noise_clip_rate"), ".1%", note)
        note = f"{clipped} whose gradient the band removed, dual clip apart"
        yield _trend("Clip rate", series("actor/pg_clipfrac"), ".1%", note)
        if series("fspo/ess"):
            note = "of the importance weights, as a share of the sequences with A ≠ 0"
            yield _trend("Effective sample size", series("fspo/ess"), ".2f", note)
        yield _trend("LRE (mean)", series("fspo/lre_mean"), ".3f", "of single steps")
        yield _trend("LRE by chance", series("fspo/lre_null"), ".3f", "null floor of single steps")
    if math.isfinite(found.lre.mean):
        low, high = found.lre.mean_interval
        yield Headline(
            name="LRE pooled",
            last=f"{found.lre.mean:.3f}",
            note=f"95% interval {low:.3f} to {high:.3f}; null floor {found.lre.null_mean:.3f}; "
            f"{len(found.pool):,} records, evenly over all steps",
        )
    mismatch = series("rollout/logprob_abs_diff/mean")
    if mismatch:
        yield _trend("Sampler against trainer", mismatch, ".1e", "mean |Δ log p| per token, nats")
    dropped = f"{series('fspo/nonfinite').total():,.0f}"
    yield Headline(name="Dropped sequences", last=dropped, note="not finite, over the whole run")
    yield _trend("Throughput", series("perf/throughput"), ",.0f", "tokens/s, prompts included")
    yield Headline(
        name="Steps",
        last=f"{len(found.steps):,} of {found.config.run.steps:,}",
        note=f"{_duration(series('timing_s/step').total())}, without evaluations and checkpoints",
    )


def _learning(history: History) -> dict[str, str]:
    rewards = [Line(series=history.series("critic/rewards/mean"), label="training", colour=BLUE)]
    accuracy = history.evaluation()
    if accuracy:
        label = f"evaluation, {accuracy.rsplit('/', 1)[-1]}"
        rewards.append(Line(series=history.series(accuracy), label=label, colour=ORANGE, marker="D"))
    svgs = {"reward": pictures.reward(rewards)}
    mean, low, high, cut = (
        history.series(f"response_length/{part}") for part in ("mean", "min", "max", "clip_ratio")
    )
    if mean:
        svgs["response_length"] = pictures.response_length(mean, low, high, cut)
    return svgs


def _clipping(found: Findings, tail: Records, last: Records, band: ClipBand | None) -> dict[str, str]:
    svgs = {}
    rates = _lines(
        found.history,
        ("fspo/out_of_band", "outside", BLUE, "-"),
        ("fspo/clip_low", "clipped low", ORANGE, "-"),
        ("fspo/clip_high", "high", PURPLE, "-"),
        ("fspo/dual_clip_frac", "dual", GREEN, "-"),
        ("fspo/noise_clip_rate", "noise", GREY, "--"),
    )
    if rates:
        svgs["clip_rate"] = pictures.clip_rate(rates)
    errors = _lines(
        found.history,
        ("fspo/lre_max", "max", ORANGE, "-"),
        ("fspo/lre_mean", "mean", BLUE, "-"),
        ("fspo/lre_null", "by chance", GREY, "--"),
    )
    if errors:
        svgs["length_error"] = pictures.length_error(errors, found.lre)
    return svgs | (_by_length(tail, last, band) if len(last) else {})


def _health(history: History) -> dict[str, str]:
    wanted = {
        "spread": _lines(
            history,
            ("fspo/sigma_hat", "σ̂", BLUE, "-"),
            ("fspo/c_low", "c low", ORANGE, "--"),
            ("fspo/c_high", "c high", PURPLE, ":"),
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
    return {
        name: pictures.small(lines, units.get(name, "L2 norm")) for name, lines in wanted.items() if lines
    }


def _lines(history: History, *wanted: tuple[str, str, str, str]) -> list[Line]:
    """(metric, label, colour, style) each; those that the run has."""
    lines = [
        Line(series=history.series(name), label=label, colour=colour, style=style)
        for name, label, colour, style in wanted
    ]
    return [line for line in lines if line.series]


def _trend(name: str, series: Series, form: str, note: str = "") -> Headline:
    first, last = series.first(_WINDOW), series.last(_WINDOW)
    return Headline(name=name, first=_number(first, form), last=_number(last, form), note=note)


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "–"


def _keys(section: BaseModel) -> str:
    values = section.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return ", ".join(f"{key} = {word}" for key, word in words.items())


def _span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
