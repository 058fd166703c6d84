"""The command: check, measure, and make the calibration of it; its figures need no process group."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_fspo import __version__
from megatron_fspo.config import Config
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.evaluation.intervals import resample_groups, wilson_interval
from megatron_fspo.lab.calibrate.page import render, write_page
from megatron_fspo.lab.calibrate.passes import Measured, PassDifference, measure, quiet, read_responses
from megatron_fspo.objective import ClipBand, FSPOBand
from megatron_fspo.objective.calibration import fit_exponent
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.objective.noise import measure_noise, two_sigma
from megatron_fspo.trainer.noise import (
    AtLength,
    Calibration,
    Check,
    FlipNoise,
    NoiseRecord,
    interval,
    lengths_up_to,
)
from megatron_fspo.trainer.prepare import Inputs, prepare

FILE = "calibration.json"
PAGE = "index.html"
SHARE = 0.01
"""Share of responses that noise may put outside the band that is recommended."""
_BINS = 4


def check(config: Config, recipes: Sequence[str], responses: Path | None, *, world_size: int) -> Inputs:
    """Read and check everything, before a process group forms.

    Raises:
        InputError: the first thing that is wrong.
    """
    band_of_run(config)
    if recipes and config.fp8.recipe != "none":
        raise InputError(f"--emulate is for runs in bfloat16 or float32; fp8.recipe is {config.fp8.recipe}")
    inputs = prepare(quiet(config, given=responses is not None), world_size=world_size)
    if responses is not None:
        count = len(read_responses(responses, inputs.config, inputs.arch))
        if count < (data := world_size // config.parallel.model_size):
            raise InputError(f"{responses} has {count} responses, fewer than the {data} data-parallel ranks")
    return inputs


def run(inputs: Inputs, recipes: Sequence[str], responses: Path | None) -> Calibration | None:
    """Measure, write the calibration into the run's folder, and return it on the first rank. Collective."""
    config = inputs.config
    writer = os.environ.get("RANK", "0") == "0"
    if writer:
        shutil.rmtree(config.run_folder, ignore_errors=True)  # what is in it was made by this command
    emulated = [config.fp8.model_copy(update={"recipe": recipe}) for recipe in recipes]
    given = read_responses(responses, config, inputs.arch) if responses is not None else []
    measured = measure(inputs, emulated, given)
    if not writer:
        return None
    calibration = make_calibration(measured, config, device=str(inputs.backend.device.type))
    (config.run_folder / FILE).write_text(calibration.model_dump_json(indent=1) + "\n", encoding="utf-8")
    write_page(calibration, config.run_folder / PAGE)
    return calibration


def report(calibration: Calibration, inputs: Inputs) -> str:
    """Return the text for the console."""
    folder = inputs.config.run_folder
    return (
        f"{render(calibration)}\n\n  for `loss.noise`   {folder / FILE}\n  page               {folder / PAGE}"
    )


def band_of_run(config: Config) -> FSPOBand:
    """Return the band that a run begins with.

    Raises:
        InputError: its loss has none on √L.
    """
    band = config.loss.band()
    if not isinstance(band, FSPOBand):
        raise InputError(f"calibrate measures the noise in FSPO's band; loss.name is {config.loss.name}")
    return band


def make_calibration(measured: Measured, config: Config, *, device: str) -> Calibration:
    """Return all figures, with intervals from resampled prompts."""
    band = band_of_run(config)
    lengths = measured.lengths
    longest = config.rollout.max_response_tokens
    width = exponent = None
    if measured.first_updates is not None:
        updates = resample_groups(lambda s, n: [two_sigma(s, n), fit_exponent(s, n)], *measured.first_updates)
        width, exponent = map(interval, updates)
    return Calibration(
        version=__version__,
        model=str(config.model.checkpoint),
        dtype=config.model.dtype,
        recipe=config.fp8.recipe,
        engine=config.rollout.engine,
        temperature=config.rollout.temperature,
        device=device,
        responses=int((lengths > 0).sum()),
        prompts=len(set(measured.groups.tolist())),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        max_response_tokens=longest,
        band=f"c_low = {band.c_low:g}, c_high = {band.c_high:g}, exponent = {band.exponent:g}, "
        f"drift = {band.drift:g}",
        comparisons=tuple(_record(compared, measured, band, longest) for compared in measured.differences),
        first_updates=width,
        first_updates_exponent=exponent,
    )


def _record(difference: PassDifference, measured: Measured, band: ClipBand, longest: int) -> NoiseRecord:
    keep = difference.sums.isfinite() & (measured.lengths > 0)
    if not keep.any():
        raise TrainingError(
            f"{difference.kind} ({difference.precision}): no response has log-probs that are finite"
        )
    sums, lengths, groups = difference.sums[keep], measured.lengths[keep], measured.groups[keep]
    at, (flipped, part) = lengths_up_to(longest), difference.flips[:, keep]
    flips = None
    if flipped.any():
        (without,) = resample_groups(lambda s, n: [measure_noise(s, n).sigma], sums - part, lengths, groups)
        share = (flipped.sum() / lengths.sum()).item()
        flips = FlipNoise(tokens=share, sigma_without=interval(without))

    def statistics(some: Tensor, of: Tensor) -> Sequence[float]:
        noise = measure_noise(some, of)
        return [
            noise.sigma,
            noise.drift,
            fit_exponent(some - noise.drift * of, of),
            noise.drift_length,
            noise.smallest_c(SHARE, longest),
            noise.smallest_c(SHARE, longest, centred=True),
            *noise.clip_rates(torch.tensor(at), band).tolist(),
        ]

    estimates = resample_groups(statistics, sums, lengths, groups)
    sigma, drift, exponent, overtakes, smallest, centred, *rates = map(interval, estimates)
    whole = measure_noise(sums, lengths)
    return NoiseRecord(
        kind=difference.kind,
        precision=difference.precision,
        emulated=difference.emulated,
        sigma=sigma,
        drift=drift,
        exponent=exponent,
        # Only where the interval of the drift is on one side of 0.
        drift_length=overtakes if (drift[1] or 0) * (drift[2] or 0) > 0 else (None, None, None),
        smallest_c=smallest,
        smallest_c_centred=centred,
        lengths=tuple(whole.lengths.int().tolist()),
        residuals=tuple(whole.residuals.tolist()),
        by_length=tuple(AtLength(length=n, clip_rate=rate) for n, rate in zip(at, rates, strict=True)),
        checks=tuple(checks(sums, lengths, groups, band)),
        flips=flips,
    )


def checks(sums: Tensor, lengths: Tensor, groups: Tensor, band: ClipBand) -> list[Check]:
    """Share outside by length: measured, and predicted from the noise of the other half of the prompts; none
    with a single prompt."""
    halves = (groups % 2 == 0), (groups % 2 == 1)
    if not all(half.any() for half in halves):
        return []
    predicted = torch.zeros(len(sums), dtype=torch.float64)
    for mine, other in (halves, halves[::-1]):
        predicted[mine] = measure_noise(sums[other], lengths[other]).clip_rates(lengths[mine], band)
    low, high = (edge.double() for edge in band.bounds(lengths.double()))
    outside = ((sums < low) | (sums > high)).double()
    bins = length_bins(lengths, _BINS)
    return [
        Check(
            low=int(lengths[here].min()),
            high=int(lengths[here].max()),
            responses=int(here.sum()),
            predicted=predicted[here].mean().item(),
            measured=interval(wilson_interval(outside[here].mean().item(), int(here.sum()))),
        )
        for here in (bins == number for number in sorted(set(bins.tolist())))
    ]
