"""The file of ``calibrate``, which holds the noise in S, and the check of a run's band against it.

The file says which passes were compared. Of these one is what the S of a run consists of before it has
learned anything: the sampler's log-probs against the trainer's where old log-probs are the sampler's; else,
as both passes are the trainer's, what its precision adds after the optimizer steps of a rollout.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.objective.noise import Noise

Interval = tuple[float | None, float | None, float | None]
"""A figure and its 95% interval; null where there is none."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AtLength(_Record):
    """Responses of one length."""

    length: int
    clip_rate: Interval
    """Share that noise alone puts outside the band."""


class Check(_Record):
    """Responses of similar lengths: the clip rate that the others predict for them, and theirs."""

    low: int
    high: int
    responses: int
    predicted: float
    measured: Interval


class FlipNoise(_Record):
    """The flipped routes of a comparison: tokens that a router sends to other experts in one pass than in the
    other."""

    tokens: float
    """Share of the response tokens."""
    sigma_without: Interval
    """sigma with their part left out of every sum."""


class NoiseRecord(_Record):
    """One comparison of two passes."""

    kind: Literal["repeat", "packs", "sampler", "precision", "updates"]
    """See :class:`megatron_fspo.lab.calibrate.passes.PassDifference`."""
    precision: str
    emulated: bool
    sigma: Interval
    drift: Interval
    exponent: Interval = (None, None, None)
    """a in spread(S - drift L) ∝ L^a, of which noise has ½; null where the lengths do not tell."""
    crossover: Interval
    """L*; null where no drift was seen."""
    smallest_c: Interval
    """The c that leaves no more than 1% outside at the run's longest length."""
    smallest_c_centred: Interval
    """The same with the drift as its centre."""
    lengths: tuple[int, ...]
    residuals: tuple[float, ...]
    """See :class:`~megatron_fspo.objective.noise.Noise`."""
    by_length: tuple[AtLength, ...]
    checks: tuple[Check, ...]
    flips: FlipNoise | None = None
    """Not in the file where no route flipped."""

    @model_serializer(mode="wrap")
    def _written(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in usual(self).items() if key != "flips" or value}

    def noise(self) -> Noise:
        """The noise as it is predicted with."""
        assert self.drift[0] is not None
        lengths, residuals = (torch.tensor(x, dtype=torch.float64) for x in (self.lengths, self.residuals))
        return Noise(drift=self.drift[0], lengths=lengths, residuals=residuals)


class Calibration(_Record):
    """The file."""

    format: Literal[1] = 1
    version: str
    """The version of this package."""
    model: str
    dtype: str
    recipe: str
    engine: str
    temperature: float
    device: str
    responses: int
    prompts: int
    tokens: int
    longest: int
    """The longest response, in tokens."""
    max_response_tokens: int
    """The run's limit."""
    band: str
    """The run's, in words."""
    comparisons: tuple[NoiseRecord, ...]
    first_updates: Interval | None
    """c = 2 sigma-hat of the first off-policy optimizer steps."""
    first_updates_exponent: Interval | None = None
    """The exponent of S there: of noise and of what training moves together."""

    @property
    def flipped(self) -> bool:
        """True if a route flipped in some comparison."""
        return any(one.flips for one in self.comparisons)

    def of_run(self, config: Config) -> NoiseRecord:
        """The comparison that is the noise in this run's S.

        Raises:
            InputError: it was measured with another precision, sampler or temperature, or not at all.
        """
        precision = own_precision(config)
        sampled = config.rollout.old_log_probs == "sampled"
        here: list[tuple[str, object, object]] = [
            ("rollout.temperature", self.temperature, config.rollout.temperature),
            ("rollout.engine", self.engine, config.rollout.engine if sampled else self.engine),
        ]
        for key, there, now in here:
            if there != now:
                raise InputError(f"loss.noise: it was measured with {key} = {there}, this run has {now}")
        # In float32 there is no finer precision to compare with.
        wanted = "sampler" if sampled else "updates" if precision != "float32" else "repeat"
        for record in self.comparisons:
            if record.kind == wanted and record.precision == precision:
                return record
        measured = ", ".join(f"{record.kind} ({record.precision})" for record in self.comparisons)
        raise InputError(
            f"loss.noise: it has {measured}, but the noise in S of this run is {wanted} ({precision}); "
            "run `megatron-fspo calibrate` with this run's configuration"
        )


def own_precision(config: Config) -> str:
    """The precision in which the layers of a run multiply."""
    return config.fp8.recipe if config.fp8.recipe != "none" else config.model.dtype


def read_calibration(path: Path) -> Calibration:
    """The file that ``loss.noise`` names. ``InputError`` where it is not one."""
    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f": {error.strerror}"
    except UnicodeDecodeError:
        problem = ": not text in UTF-8"
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        what = f"{where}: {error.errors()[0]['msg']}"
        problem = f" is not a file of `megatron-fspo calibrate`: {what}"
    raise InputError(f"loss.noise = {path}{problem}")


def noise_of_run(config: Config) -> Noise | None:
    """The noise in S of a run, as far as it was measured.

    Raises:
        InputError: ``loss.noise`` is of another run, or the band lies inside the noise.
    """
    path = config.loss.noise_file()
    if path is None:
        return None
    record = read_calibration(path).of_run(config)
    noise = record.noise()
    lengths = lengths_up_to(config.rollout.max_response_tokens)
    config.loss.check_noise(noise, lengths, f"{record.kind} ({record.precision})")
    return noise


def lengths_up_to(longest: int) -> list[int]:
    """Powers of 2 from 16 on, and the longest."""
    return [*(2**i for i in range(4, 31) if 2**i < longest), longest]


def interval(estimate: Estimate) -> Interval:
    """The figure as JSON has it."""
    figures = (estimate.value, estimate.low, estimate.high)
    value, low, high = (x if math.isfinite(x) else None for x in figures)
    return value, low, high
