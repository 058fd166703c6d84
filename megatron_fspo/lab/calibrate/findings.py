"""From sums over responses to what a person wants to know of them. Pure: no process group, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo import __version__
from megatron_fspo.config import Config
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.lab.calibrate.passes import Difference, Measured
from megatron_fspo.lab.report.history import wilson_interval
from megatron_fspo.objective import ClipBand, FSPOBand
from megatron_fspo.objective.exponent import fit_exponent
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.objective.noise import estimate, noise_of, two_sigma
from megatron_fspo.trainer.noise import (
    AtLength,
    Calibration,
    Check,
    Interval,
    NoiseRecord,
    interval,
    lengths_up_to,
)

SHARE = 0.01
"""Of responses that noise may put outside the band that is recommended."""
_BINS = 4


@dataclass(frozen=True, kw_only=True)
class Band:
    """The run's, for the table."""

    band: ClipBand
    words: str


def band_of_run(config: Config) -> Band:
    """The band that a run begins with.

    Raises:
        InputError: its loss has none on √L.
    """
    band = config.loss.band()
    if not isinstance(band, FSPOBand):
        raise InputError(f"calibrate measures the noise in FSPO's band; loss.name is {config.loss.name}")
    words = (
        f"c_low = {band.c_low:g}, c_high = {band.c_high:g}, exponent = {band.exponent:g}, "
        f"drift = {band.drift:g}"
    )
    return Band(band=band, words=words)


def findings(measured: Measured, config: Config, *, device: str) -> Calibration:
    """All figures, with intervals from resampled prompts."""
    band = band_of_run(config)
    lengths = measured.lengths
    longest = config.rollout.max_response_tokens
    first = measured.first_updates
    updates = None if first is None else estimate(lambda s, n: [two_sigma(s, n), fit_exponent(s, n)], *first)
    return Calibration(
        version=__version__,
        model=str(config.model.checkpoint),
        dtype=config.model.dtype,
        recipe=config.fp8.recipe,
        engine=config.rollout.engine,
        temperature=config.rollout.temperature,
        device=device,
        responses=int((lengths > 0).sum()),
        prompts=len(measured.groups.unique()),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        max_response_tokens=longest,
        band=band.words,
        comparisons=tuple(_record(found, measured, band.band, longest) for found in measured.differences),
        first_updates=None if updates is None else interval(updates[0]),
        first_updates_exponent=None if updates is None else interval(updates[1]),
    )


def _record(found: Difference, measured: Measured, band: ClipBand, longest: int) -> NoiseRecord:
    keep = found.sums.isfinite() & (measured.lengths > 0)
    if not keep.any():
        raise TrainingError(f"{found.kind} ({found.precision}): no response has log-probs that are finite")
    sums, lengths, groups = found.sums[keep], measured.lengths[keep], measured.groups[keep]
    at = lengths_up_to(longest)

    def statistics(some: Tensor, of: Tensor) -> Sequence[float]:
        noise = noise_of(some, of)
        return [
            noise.sigma,
            noise.drift,
            fit_exponent(some - noise.drift * of, of),
            noise.crossover,
            noise.smallest_c(SHARE, longest),
            noise.smallest_c(SHARE, longest, centred=True),
            *noise.clip_rates(torch.tensor(at), band).tolist(),
        ]

    found_by = estimate(statistics, sums, lengths, groups)
    sigma, drift, exponent, crossover, smallest, centred, *rates = map(interval, found_by)
    whole = noise_of(sums, lengths)
    return NoiseRecord(
        kind=found.kind,
        precision=found.precision,
        emulated=found.emulated,
        sigma=sigma,
        drift=drift,
        exponent=exponent,
        crossover=crossover if _seen(drift) else (None, None, None),
        smallest_c=smallest,
        smallest_c_centred=centred,
        lengths=tuple(whole.lengths.int().tolist()),
        residuals=tuple(whole.residuals.tolist()),
        by_length=tuple(AtLength(length=n, clip_rate=rate) for n, rate in zip(at, rates, strict=True)),
        checks=tuple(checks(sums, lengths, groups, band)),
    )


def _seen(drift: Interval) -> bool:
    """Whether its interval is on one side of 0."""
    _, low, high = drift
    return low is not None and high is not None and low * high > 0


def checks(sums: Tensor, lengths: Tensor, groups: Tensor, band: ClipBand) -> list[Check]:
    """By length: how many responses lie outside, and how many the noise of the other half of the prompts puts
    there; none with a single prompt."""
    halves = (groups % 2 == 0), (groups % 2 == 1)
    if not all(half.any() for half in halves):
        return []
    predicted = torch.zeros(len(sums), dtype=torch.float64)
    for mine, other in (halves, halves[::-1]):
        predicted[mine] = noise_of(sums[other], lengths[other]).clip_rates(lengths[mine], band)
    low, high = (edge.double() for edge in band.bounds(lengths.double()))
    outside = (sums < low) | (sums > high)
    bins = length_bins(lengths, _BINS)
    found = []
    for number in bins.unique().tolist():
        here = bins == number
        rate, count = outside[here].double().mean().item(), int(here.sum())
        found.append(
            Check(
                low=int(lengths[here].min()),
                high=int(lengths[here].max()),
                responses=count,
                predicted=predicted[here].mean().item(),
                measured=(rate, *wilson_interval(rate, count)),
            )
        )
    return found
