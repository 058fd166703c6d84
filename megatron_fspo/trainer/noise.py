"""The file of ``calibrate`` with the measured noise in S, and the check of a run's band against it.

The file has several comparisons of two passes. The one that applies to a run is its S without learning: if
old log-probs are the sampler's, the difference between sampler and trainer; otherwise both passes are the
trainer's, and it is what the precision adds to S after the optimizer steps of a rollout.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.objective.noise import Noise

Interval = tuple[float | None, float | None, float | None]
"""Value and ends of its 95% interval; None (null in the file) if unknown."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AtLength(_Record):
    """Responses of one length."""

    length: int
    clip_rate: Interval
    """Share of responses that noise alone puts outside the band."""


class Check(_Record):
    """Clip rate of responses of similar lengths: predicted from the other responses, and measured."""

    low: int
    high: int
    responses: int
    predicted: float
    measured: Interval


class FlipNoise(_Record):
    """Tokens that a router sends to different experts in the two passes of a comparison."""

    tokens: float
    """Share of the response tokens."""
    sigma_without: Interval
    """σ̂ without the contributions of these tokens to S."""


class NoiseRecord(_Record):
    """One comparison of two passes."""

    kind: Literal["repeat", "packs", "sampler", "precision", "updates"]
    """See :class:`megatron_fspo.lab.calibrate.passes.PassDifference`."""
    precision: str
    emulated: bool
    sigma: Interval
    drift: Interval
    exponent: Interval = (None, None, None)
    """a in spread(S − drift·L) ∝ L^a, ½ for independent noise; null if the range of lengths is too small."""
    drift_length: Interval
    """Tokens at which the drift equals sigma·√L; null if no drift was measured."""
    smallest_c: Interval
    """Smallest c with at most 1% of the responses outside the band at the run's longest length."""
    smallest_c_centred: Interval
    """The same for a band that is centred on the drift."""
    lengths: tuple[int, ...]
    residuals: tuple[float, ...]
    """See :class:`~megatron_fspo.objective.noise.Noise`."""
    by_length: tuple[AtLength, ...]
    checks: tuple[Check, ...]
    flips: FlipNoise | None = None
    """Not in the file if no route flipped."""

    @model_serializer(mode="wrap")
    def _written(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in usual(self).items() if key != "flips" or value}

    def noise(self) -> Noise:
        """Return the noise, for predictions."""
        assert self.drift[0] is not None
        lengths, residuals = (torch.tensor(x, dtype=torch.float64) for x in (self.lengths, self.residuals))
        sampled = self.kind == "sampler"
        return Noise(drift=self.drift[0], lengths=lengths, residuals=residuals, of_sampler=sampled)


class Calibration(_Record):
    """The content of the file."""

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
    """Description of the run's band."""
    comparisons: tuple[NoiseRecord, ...]
    first_updates: Interval | None
    """c = 2σ̂ of the first off-policy optimizer steps."""
    first_updates_exponent: Interval | None = None
    """The exponent of S in these steps, from noise and learning together."""

    @property
    def flipped(self) -> bool:
        """True if a route flipped in any comparison."""
        return any(record.flips for record in self.comparisons)

    def select_for_run(self, config: Config) -> NoiseRecord:
        """Return the comparison that measures the noise in this run's S. Raises ``InputError`` if none has
        the run's precision, sampler and temperature."""
        precision = own_precision(config)
        sampled = config.rollout.old_log_probs == "sampled"
        here: list[tuple[str, object, object]] = [
            ("rollout.temperature", self.temperature, config.rollout.temperature),
            ("rollout.engine", self.engine, config.rollout.engine if sampled else self.engine),
        ]
        for key, there, now in here:
            if there != now:
                raise InputError(f"loss.noise: it was measured with {key} = {there}, but this run has {now}")
        # For float32 there is no higher precision to compare with.
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
    """Return the precision of a run's matrix products: the FP8 recipe or ``model.dtype``."""
    return config.fp8.recipe if config.fp8.recipe != "none" else config.model.dtype


def read_calibration(path: Path) -> Calibration:
    """Read a file of ``calibrate``. Raises ``InputError`` if it cannot be read or is not valid."""
    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f": {error.strerror}"
    except UnicodeDecodeError:
        problem = ": it is not UTF-8 text"
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        what = f"{where}: {error.errors()[0]['msg']}"
        problem = f" is not a file of `megatron-fspo calibrate`: {what}"
    raise InputError(f"loss.noise = {path}{problem}")


def noise_of_run(config: Config) -> Noise | None:
    """Return the noise in a run's S from the file ``loss.noise``; None without one. Raises ``InputError`` if
    the file does not fit the run's configuration, or the band lies inside the noise."""
    path = config.loss.noise_file()
    if path is None:
        return None
    record = read_calibration(path).select_for_run(config)
    noise = record.noise()
    lengths = lengths_up_to(config.rollout.max_response_tokens)
    config.loss.check_noise(noise, lengths, f"{record.kind} ({record.precision})")
    return noise


def lengths_up_to(longest: int) -> list[int]:
    """Return the powers of 2 from 16 to below ``longest``, and ``longest``."""
    return [*(2**i for i in range(4, 31) if 2**i < longest), longest]


def interval(estimate: Estimate) -> Interval:
    """Convert an estimate for JSON: None for non-finite values."""
    figures = (estimate.value, estimate.low, estimate.high)
    value, low, high = (x if math.isfinite(x) else None for x in figures)
    return value, low, high
