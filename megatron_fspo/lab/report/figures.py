"""A run as its report has it: settings, metrics, kept sequences, and the numbers that sum them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.evaluation.tables import number
from megatron_fspo.lab.report.history import History, Records, Series, pooled_lre, read_records, signed_errors
from megatron_fspo.lab.report.samples import accuracy_change, first_and_last_samples
from megatron_fspo.objective import ClipBand, FSPOBand
from megatron_fspo.objective.calibration import Exponent, measure_exponent
from megatron_fspo.record.rows import JOBS, PHASES, WARNINGS, read_rows

ABSENT = "–"
WINDOW = 5
"""Steps behind each number of the table, at most; the first and the last are half of a short run each."""
TAIL = 0.25
"""Share of the steps, the last ones, in the picture of clip rates by length."""
_POOL = 40_000
"""Records behind the pooled LRE and the exponent, at most, evenly over the run: 400 resamples in a second."""
_BLOCKS = 12
"""Stretches of steps behind the interval of the exponent, at most: 0.2 s each with the largest pool."""
LEARNED = {"reward": "critic/rewards/mean", "loss": "actor/pg_loss"}
"""What a run should improve → its metric."""
_BETWEEN = {"testing": "evaluation", "save_checkpoint": "checkpoint"}
"""Phases between steps, which the time of a step leaves out."""


class RunData:
    """Everything that a page shows of a run.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """

    def __init__(self, folder: Path) -> None:
        self.history = History(folder)
        self.config = load_config(folder / "config.toml")
        self.steps: list[int] = self.history.series(LEARNED[self.learned]).steps.tolist()
        self.records = read_records(folder)
        self.pool = self.records.thinned(_POOL)
        self.lre = pooled_lre(self.pool)
        """LRE of out-of-band acceptance."""
        self.signed = signed_errors(self.pool)
        """How uneven what a clip really removes is."""
        self.exponent = exponent_by_step(self.pool)
        self.samples = first_and_last_samples(folder, self.history)
        self.change = accuracy_change(self.history, self.samples)
        self.jobs = list(read_rows(folder / JOBS))
        self.warnings = list({row["title"]: row for row in read_rows(folder / WARNINGS)}.values())
        """The last one of each title."""

    @property
    def learned(self) -> str:
        """What the run should improve, a key of :data:`LEARNED`."""
        return "loss" if self.config.supervised else "reward"

    @property
    def token_level(self) -> bool:
        """True where clip rates are shares of tokens, and there is no band on S."""
        return self.config.loss.band() is None

    def band(self) -> ClipBand | None:
        """Return the band at the end of the run, if there is one on S."""
        return band_at_end(self.config, self.history)


def exponent_by_step(records: Records) -> Exponent | str:
    """Return the exponent of S over the steps of these records; where it cannot be measured, why.

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
    """Return the band at the end of a run, if there is one on S."""
    loss = config.loss.from_metrics(lambda name: history.series(name).last(1))
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
    """Return the phases that took any time, in the order of a step; empty for a run that timed no step."""
    steps = history.series("timing_s/step")
    if not len(steps):
        return []

    def mean(name: str) -> float:
        return history.series(f"timing_s/{name}").total() / len(steps)

    seconds = {words: mean(name) for name, words in PHASES.items()}
    # Packing, sums over ranks, logging.
    seconds["the rest"] = max(mean("step") - sum(seconds.values()), 0.0)
    seconds |= {words: mean(name) for name, words in _BETWEEN.items()}
    whole = sum(seconds.values())
    return [
        TimeShare(name=words, seconds=spent, share=spent / whole, between=words in _BETWEEN.values())
        for words, spent in seconds.items()
        if spent > 0
    ]


def machines(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the machines that computed and their versions, in words, by the rows of ``jobs.jsonl``; empty
    without any. A job that went on with the same as the one before is left out."""
    if not jobs:
        return {}
    versions = _changes(jobs, lambda job: ", ".join(f"{name} {n}" for name, n in job["versions"].items()))
    return {"Hardware": _changes(jobs, _hardware), "Versions": versions}


def _hardware(job: Mapping[str, Any]) -> str:
    count, device = job["processes"], job["device"]
    processes = f"{count} process{'es' if count > 1 else ''}"
    cpu = f"{job['cpu']}, {job['cores']} cores on the first machine"
    return f"{processes} on {cpu}" if device == "CPU" else f"{processes} × {device}; {cpu}"


def _changes(jobs: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], str]) -> str:
    """Return those that are not as the one before, from which step on."""
    (_, first), *later = ((next(same)["step"], words) for words, same in groupby(jobs, of))
    return "; ".join([first, *(f"from step {step + 1}: {words}" for step, words in later)])


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the table of numbers."""

    name: str
    first: str = ""
    last: str
    note: str = ""


def facts(data: RunData) -> dict[str, str]:
    """Return what a reader asks first, in words."""
    config, band = data.config, data.band()
    prompts, samples = config.rollout.prompts, config.samples
    reward = [] if config.supervised else [f"reward {config.reward.name}"]
    files = ", ".join(str(dataset.file) for dataset in config.data.train_sets)
    moved = {}
    if isinstance(band, FSPOBand):
        width = f"c = {band.c_low:.4g} (low), {band.c_high:.4g} (high)"
        moved["Band at the end"] = f"{width}, exponent {band.exponent:.3g}"
    return {
        "Loss": config.loss.name,
        **moved,
        "Model": f"{config.model.checkpoint}, {config.model.dtype}",
        "Data": ", ".join([files, *reward, f"seed {config.run.seed}"]),
        "Responses": f"{prompts * samples} a step: {samples} to each of {prompts} prompts",
    } | machines(data.jobs)


def changed_keys(config: Config) -> list[tuple[str, str]]:
    """Return key and value of the settings that are not as the defaults have them, or have no default."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    return [
        (f"{section}.{key}", in_words(value)) for section, keys in tree.items() for key, value in keys.items()
    ]


def headlines(data: RunData) -> Iterator[Headline]:
    """Yield the numbers that sum up the run: means over the first and the last steps."""
    series, accuracy = data.history.series, data.history.evaluation()
    yield _trend(data.learned.capitalize(), series(LEARNED[data.learned]), ".3f")
    if accuracy:
        scores, change = series(accuracy), data.change
        note = f"{accuracy.removeprefix('val/')}, at step {scores.steps[0]} and step {scores.steps[-1]}"
        if change is not None and change.interval is not None:
            note += f"; gained {change.after - change.before:.3f}, 95% interval {change.interval[0]:.3f} to "
            note += f"{change.interval[1]:.3f} over prompts"
        yield _trend("Evaluation", scores, ".3f", note, window=1)
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
    if mismatch := series("rollout/logprob_abs_diff/mean"):
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
    outside, clipped = "sequences, on either side", "sequences"
    if data.token_level:
        outside, clipped = "sequences with a token outside", "tokens"
    noise = "expected of the noise that was measured before the run"
    clipped += " whose gradient the band removed, dual clip apart"
    weights = "of the importance weights, as a share of the sequences with A ≠ 0"
    for name, metric, form, note in (
        ("Outside the band", "fspo/out_of_band", ".1%", outside),
        ("Outside by noise", "fspo/noise_clip_rate", ".1%", noise),
        ("Clip rate", "actor/pg_clipfrac", ".1%", clipped),
        ("Effective sample size", "fspo/ess", ".2f", weights),
        ("LRE (mean)", "fspo/lre_mean", ".3f", "of single steps"),
        ("LRE by chance", "fspo/lre_null", ".3f", "null floor of single steps"),
    ):
        series = data.history.series(metric)
        if series or metric not in ("fspo/noise_clip_rate", "fspo/ess"):
            yield _trend(name, series, form, note)


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


def disjoint(count: int) -> int:
    """Return how many steps the first and the last of so many are, none in both."""
    return min(WINDOW, max(count // 2, 1))


def _trend(name: str, series: Series, form: str, note: str = "", window: int = 0) -> Headline:
    window = window or disjoint(len(series))
    first, last = (number(mean, form, ABSENT) for mean in (series.first(window), series.last(window)))
    return Headline(name=name, first=first, last=last, note=note)


def in_words(value: Any) -> str:
    """Return a setting, as TOML has it where it is true or false."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def duration(seconds: float) -> str:
    """Return seconds in words, to the second below an hour and to the minute above."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
