"""What was run, and the numbers that sum it up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from megatron_fspo.lab.report.change import Change
from megatron_fspo.lab.report.findings import WINDOW, Findings
from megatron_fspo.lab.report.history import Series
from megatron_fspo.lab.report.times import machines
from megatron_fspo.objective import FSPOBand


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the table of numbers."""

    name: str
    first: str = ""
    last: str
    note: str = ""


def facts(found: Findings) -> dict[str, str]:
    """What was run."""
    config, band = found.config, found.band()
    loss = f"{config.loss.name}: {_keys(config.loss)}"
    if isinstance(band, FSPOBand):
        loss += f"; at the end c = {band.c_low:.4g} (low), {band.c_high:.4g} (high)"
        loss += f", exponent {band.exponent:.3g}"
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
    } | machines(found.jobs)


def headlines(found: Findings) -> Iterator[Headline]:
    """The numbers that sum up the run: means over the first and the last steps."""
    series, accuracy = found.history.series, found.history.evaluation()
    yield _trend("Reward", series("critic/rewards/mean"), ".3f")
    if accuracy:
        scores = series(accuracy)
        yield Headline(
            name="Evaluation",
            first=number(scores.first(1), ".3f"),
            last=number(scores.last(1), ".3f"),
            note=f"{accuracy.removeprefix('val/')}, at step {scores.steps[0]} and step {scores.steps[-1]}"
            + _gain(found.change),
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
    if len(found.pool):
        yield _exponent(found)
    mismatch = series("rollout/logprob_abs_diff/mean")
    if mismatch:
        yield _trend("Sampler against trainer", mismatch, ".1e", "mean |Δ log p| per token, nats")
    dropped = f"{series('fspo/nonfinite').total():,.0f}"
    yield Headline(name="Dropped sequences", last=dropped, note="not finite, over the whole run")
    yield _trend("Throughput", series("perf/throughput"), ",.0f", "tokens/s, prompts included")
    yield Headline(
        name="Steps",
        last=f"{len(found.steps):,} of {found.config.run.steps:,}",
        note=f"{duration(series('timing_s/step').total())}, without evaluations and checkpoints",
    )


def _gain(change: Change | None) -> str:
    if change is None or change.interval is None:
        return ""
    low, high = change.interval
    return f"; gained {change.after - change.before:.3f}, 95% interval {low:.3f} to {high:.3f} over prompts"


def _exponent(found: Findings) -> Headline:
    name, measured = "Exponent of S", found.exponent
    if isinstance(measured, str):
        return Headline(name=name, last="–", note=f"not measured: {measured}")
    low, high = measured.interval
    band = found.band()
    own = f"; the band has {band.exponent:.3g}" if isinstance(band, FSPOBand) else ""
    return Headline(
        name=name,
        last=f"{measured.value:.2f}",
        note=f"a in spread(S) ∝ L^a; 95% interval {low:.2f} to {high:.2f} over steps, lengths up to "
        f"{measured.span:.1f} times the shortest; ½ is the law of noise{own}",
    )


def _trend(name: str, series: Series, form: str, note: str = "") -> Headline:
    first, last = series.first(WINDOW), series.last(WINDOW)
    return Headline(name=name, first=number(first, form), last=number(last, form), note=note)


def number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "–"


def _keys(section: BaseModel) -> str:
    values = section.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return ", ".join(f"{key} = {word}" for key, word in words.items())


def span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
