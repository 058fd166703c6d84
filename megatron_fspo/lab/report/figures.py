"""A run as its report has it: settings, metrics, kept sequences, and the numbers that sum them up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.evaluation.tables import number
from megatron_fspo.lab.report.history import History, Records, Series, pooled_lre, read_records
from megatron_fspo.lab.report.samples import AccuracyChange, accuracy_change, first_and_last_samples
from megatron_fspo.objective import ClipBand, FSPOBand, LengthReweightingError
from megatron_fspo.objective.calibration import Exponent, measure_exponent
from megatron_fspo.record.log import JOBS, PHASES, WARNINGS, read_rows

ABSENT = "–"
WINDOW = 5
"""Steps behind each number of the table."""
TAIL = 0.25
"""Share of the steps, the last ones, in the picture of clip rates by length."""
_POOL = 40_000
"""Records behind the pooled LRE, at most: its 400 resamples take a second then."""
_BLOCKS = 12
"""Stretches of steps behind the interval of the exponent, at most: 0.2 s each with the largest pool."""
_BETWEEN = {"testing": "evaluation", "save_checkpoint": "checkpoint"}
"""Phases between steps, which the time of a step leaves out."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that a page shows of a run."""

    config: Config
    history: History
    records: Records
    pool: Records
    """An even sample of ``records``; all of them where they are not too many."""
    lre: LengthReweightingError
    """LRE of out-of-band acceptance over ``pool``."""
    exponent: Exponent | str
    """Exponent of S in ``pool``; where it cannot be measured, why."""
    change: AccuracyChange | None
    jobs: list[dict[str, Any]]
    """The machine of each job of the run."""
    warnings: list[dict[str, Any]]
    """The last one of each title."""
    samples: list[dict[str, Any]]
    """Responses that its first and its last evaluation kept."""

    @property
    def token_level(self) -> bool:
        """True where clip rates are shares of tokens, and there is no band on S."""
        return self.config.loss.band() is None

    @property
    def steps(self) -> list[int]:
        """The training steps made."""
        steps: list[int] = self.history.series("critic/rewards/mean").steps.tolist()
        return steps

    def band(self) -> ClipBand | None:
        """The band at the end of the run, if there is one on S."""
        return band_at_end(self.config, self.history)


def read_run(folder: Path) -> RunData:
    """Read the folder of a run.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """
    history = History(folder)
    records = read_records(folder)
    pool = records.thinned(_POOL)
    samples = first_and_last_samples(folder, history)
    return RunData(
        config=load_config(folder / "config.toml"),
        history=history,
        records=records,
        pool=pool,
        lre=pooled_lre(pool),
        exponent=exponent_of(pool),
        change=accuracy_change(history, samples),
        jobs=list(read_rows(folder / JOBS)),
        warnings=list({row["title"]: row for row in read_rows(folder / WARNINGS)}.values()),
        samples=samples,
    )


def exponent_of(records: Records) -> Exponent | str:
    """The exponent of S over the steps of these records; where it cannot be measured, why.

    Its interval leaves out one stretch of steps after the other: neighbouring steps are no strangers to each
    other, and one by one thousands of them would take minutes.
    """
    steps, position = np.unique(records.step, return_inverse=True)
    blocks = position * min(_BLOCKS, len(steps)) // max(len(steps), 1)
    try:
        return measure_exponent(
            torch.from_numpy(records.log_ratio_sum),
            torch.from_numpy(records.length),
            torch.from_numpy(blocks),
        )
    except ValueError as error:
        return str(error)


def band_at_end(config: Config, history: History) -> ClipBand | None:
    """The band at the end of a run, if there is one on S."""
    loss = config.loss.reported(lambda name: history.series(name).last(1))
    return None if loss is None else loss.band()


@dataclass(frozen=True, kw_only=True)
class TimeShare:
    """A kind of work in a step, or between steps."""

    name: str
    seconds: float
    """Mean over all steps, also those that had none of it."""
    share: float
    """Share of the whole time of the steps and what was done between them."""
    between: bool
    """Done between steps: evaluations and checkpoints."""


def phases(history: History) -> list[TimeShare]:
    """The phases that took any time, in the order of a step; empty for a run that timed no step."""
    steps = len(history.series("timing_s/step").steps)
    if not steps:
        return []
    seconds = {
        words: history.series(f"timing_s/{name}").total() / steps
        for name, words in (PHASES | _BETWEEN | {"step": "step"}).items()
    }
    step = seconds.pop("step")
    between = {words: seconds.pop(words) for words in _BETWEEN.values()}
    # Packing, sums over ranks, logging.
    inside = seconds | {"the rest": max(step - sum(seconds.values()), 0.0)}
    whole = sum(inside.values()) + sum(between.values())
    return [
        TimeShare(name=words, seconds=mean, share=mean / whole, between=words in between)
        for words, mean in (inside | between).items()
        if mean > 0
    ]


def machines(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The machines that computed and their versions, in words; empty for a run without jobs.

    Args:
        jobs: rows of ``jobs.jsonl``. A job that went on with the same as the one before is left out.
    """
    hardware = _changes([(job["step"], _hardware(job)) for job in jobs])
    packages = [", ".join(f"{name} {version}" for name, version in job["versions"].items()) for job in jobs]
    versions = _changes([(job["step"], words) for job, words in zip(jobs, packages, strict=True)])
    return {"Hardware": hardware, "Versions": versions} if jobs else {}


def _hardware(job: Mapping[str, Any]) -> str:
    count, device = job["processes"], job["device"]
    processes = f"{count} process{'es' if count > 1 else ''}"
    cpu = f"{job['cpu']}, {job['cores']} cores on the first machine"
    return f"{processes} on {cpu}" if device == "CPU" else f"{processes} × {device}; {cpu}"


def _changes(steps_and_words: Sequence[tuple[int, str]]) -> str:
    """Those that are not as the one before, from which step on."""
    pairs = zip([(0, ""), *steps_and_words], steps_and_words, strict=False)
    kept = [one for before, one in pairs if one[1] != before[1]]
    return "; ".join(
        f"from step {step + 1}: {words}" if position else words for position, (step, words) in enumerate(kept)
    )


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the table of numbers."""

    name: str
    first: str = ""
    last: str
    note: str = ""


def facts(data: RunData) -> dict[str, str]:
    """The settings of the run, in words."""
    config, band = data.config, data.band()
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
    } | machines(data.jobs)


def headlines(data: RunData) -> Iterator[Headline]:
    """The numbers that sum up the run: means over the first and the last steps."""
    series, accuracy = data.history.series, data.history.evaluation()
    yield _trend("Reward", series("critic/rewards/mean"), ".3f")
    if accuracy:
        scores = series(accuracy)
        yield Headline(
            name="Evaluation",
            first=number(scores.first(1), ".3f", ABSENT),
            last=number(scores.last(1), ".3f", ABSENT),
            note=f"{accuracy.removeprefix('val/')}, at step {scores.steps[0]} and step {scores.steps[-1]}"
            + _gain(data.change),
        )
    yield _trend("Response length", series("response_length/mean"), ",.1f", "tokens")
    if series("fspo/out_of_band"):
        yield from _clipping(data)
    if math.isfinite(data.lre.mean):
        low, high = data.lre.mean_interval
        yield Headline(
            name="LRE pooled",
            last=f"{data.lre.mean:.3f}",
            note=f"95% interval {low:.3f} to {high:.3f}; null floor {data.lre.null_mean:.3f}; "
            f"{len(data.pool):,} records, evenly over all steps",
        )
    if len(data.pool):
        yield _exponent(data)
    mismatch = series("rollout/logprob_abs_diff/mean")
    if mismatch:
        yield _trend("Sampler against trainer", mismatch, ".1e", "mean |Δ log p| per token, nats")
    dropped = f"{series('fspo/nonfinite').total():,.0f}"
    yield Headline(name="Dropped sequences", last=dropped, note="not finite, over the whole run")
    yield _trend("Throughput", series("perf/throughput"), ",.0f", "tokens/s, prompts included")
    yield Headline(
        name="Steps",
        last=f"{len(data.steps):,} of {data.config.run.steps:,}",
        note=f"{duration(series('timing_s/step').total())}, without evaluations and checkpoints",
    )


def _clipping(data: RunData) -> Iterator[Headline]:
    series = data.history.series
    outside, clipped = "sequences, on either side", "sequences"
    if data.token_level:
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


def _gain(change: AccuracyChange | None) -> str:
    if change is None or change.interval is None:
        return ""
    low, high = change.interval
    return f"; gained {change.after - change.before:.3f}, 95% interval {low:.3f} to {high:.3f} over prompts"


def _exponent(data: RunData) -> Headline:
    name, measured, band = "Exponent of S", data.exponent, data.band()
    if isinstance(measured, str):
        return Headline(name=name, last=ABSENT, note=f"not measured: {measured}")
    low, high = measured.interval
    own = f"; the band has {band.exponent:.3g}" if isinstance(band, FSPOBand) else ""
    return Headline(
        name=name,
        last=f"{measured.value:.2f}",
        note=f"a in spread(S) ∝ L^a; 95% interval {low:.2f} to {high:.2f} over steps, lengths up to "
        f"{measured.span:.1f} times the shortest; ½ is the law of noise{own}",
    )


def _trend(name: str, series: Series, form: str, note: str = "") -> Headline:
    first, last = (number(mean, form, ABSENT) for mean in (series.first(WINDOW), series.last(WINDOW)))
    return Headline(name=name, first=first, last=last, note=note)


def _keys(section: BaseModel) -> str:
    values = section.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return ", ".join(f"{key} = {word}" for key, word in words.items())


def duration(seconds: float) -> str:
    """Seconds in words, to the second below an hour and to the minute above."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
