"""Chance in a dump: the null floor and interval of LRE, and an S that no learning is in.

LRE is taken from counts, which is the same work for a million rows as for a thousand.

:func:`~megatron_fspo.objective.length_reweighting_error` permutes and resamples rows one by one. What
that does to the counts of a bin has a known distribution, which is drawn from here. Rows of one cluster (a
prompt, or a response that several updates saw) are accepted together: deviations that are drawn as if rows
were independent are widened by the root of the design effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.objective import LengthReweightingError, length_reweighting_error
from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.objective.fairness import length_bins

NUM_BINS = 8
_DRAWS = 1000
Source = Literal["sampler", "signs", "normal"]
_LEAST = 100_000
"""Responses, or tokens where they are known, to draw at random, at least."""
_MOST_TIMES = 20


def lre_of(accepted: Tensor, lengths: Tensor, clusters: Tensor) -> LengthReweightingError:
    """LRE of ``accepted`` [N] bool, inside the band, over lengths L [N], with null floor and 95% intervals.
    Rows of different clusters [N] int64, from 0, are independent."""
    error = length_reweighting_error(accepted, lengths, NUM_BINS, permutations=0, bootstrap=0)
    total = int((lengths > 0).sum())
    counts = np.array([round(bin.share * total) for bin in error.bins])
    passed = np.array([round(bin.accepted_rate * n) for bin, n in zip(error.bins, counts, strict=True)])
    if not passed.sum():
        return error
    widening = design_effect(accepted, lengths, clusters) ** 0.5
    random = np.random.default_rng(0)
    # Flags permuted: which bins the accepted ones fall into.
    null = random.multivariate_hypergeometric(counts, int(passed.sum()), size=_DRAWS)
    null_mean, null_max = _errors(np.broadcast_to(counts, null.shape), null, 0.0, widening)
    # Rows resampled: how many of each bin, accepted and not.
    cells = np.concatenate([passed, counts - passed])
    drawn = random.multinomial(total, cells / total, size=_DRAWS)
    accepted_again = drawn[:, : len(counts)]
    measured = passed / counts / (passed.sum() / total) - 1.0
    means, maxima = _errors(accepted_again + drawn[:, len(counts) :], accepted_again, measured, widening)
    return replace(
        error,
        null_mean=float(null_mean.mean()),
        null_max=float(null_max.mean()),
        mean_interval=_interval(means),
        max_interval=_interval(maxima),
    )


def design_effect(accepted: Tensor, lengths: Tensor, clusters: Tensor) -> float:
    """The factor by which clusters [N] raise the variance of the bins' acceptance rates; at least 1.

    The variance over clusters of what each adds to a bin's rate less the overall one, over that of
    independent rows (Kish's design effect), both averaged over bins by their shares. Taken about the overall
    rate, as if length did not matter: where each length is a prompt of its own, the two look the same.
    """
    full = lengths > 0
    bins = length_bins(lengths[full], NUM_BINS)
    flags, groups = accepted[full].double(), torch.unique(clusters[full], return_inverse=True)[1]
    size, number = int(bins.max()) + 1, int(groups.max()) + 1
    counts = bins.bincount(minlength=size).double()
    rate = flags.mean()
    by_cluster = (groups * size + bins).bincount(weights=flags - rate, minlength=number * size)
    by_cluster = by_cluster.view(number, size)
    added = by_cluster / counts - by_cluster.sum(1, keepdim=True) / len(flags)
    independent = rate * (1 - rate) * (1 / counts - 1 / len(flags))
    wanted = (counts * independent).sum().item()
    if number in (1, len(flags)) or not wanted:
        return 1.0
    spread = (counts * added.square().sum(0)).sum().item()
    return max(1.0, float(number / (number - 1) * spread / wanted))


def _errors(
    counts: npt.NDArray[Any], passed: npt.NDArray[Any], centre: npt.NDArray[Any] | float, widening: float
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """LRE mean and max [draws] of rows and accepted rows [draws, B], whose deviations from ``centre`` [B] are
    widened."""
    total = counts.sum(1, keepdims=True)
    overall = passed.sum(1, keepdims=True) / total
    # A bin that a draw missed has no rate and no share. A draw with nothing accepted is nan.
    with np.errstate(invalid="ignore"):
        error = passed / np.maximum(counts, 1) / overall - 1.0
    error = np.abs(centre + widening * (error - centre)) * (counts > 0)
    return (counts / total * error).sum(1), error.max(1)


def _interval(values: npt.NDArray[Any]) -> tuple[float, float]:
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def noise_alone(dump: Dump) -> tuple[Dump, Source]:
    """The responses, each as often as any other, with S of noise, and where that comes from.

    sampler: S = Σ_t (log π_old − log π_sampler), of two policies that should agree: as measured.
    signs: each token's log-ratio with a sign at random: the same sizes, without a direction.
    normal: S = σ̂·√L·Z where tokens are not known. σ̂ is the robust spread of S itself.

    The last two are what is left if *all* of S were chance: they bound the noise and do not measure it.
    """
    if dump.sampler_gap is not None:
        gap = dump.sampler_gap
        return replace(dump, log_ratio=gap, log_ratio_sum=_totals(gap, dump.lengths)), "sampler"
    generator = torch.Generator().manual_seed(0)
    tokens = dump.log_ratio
    times = max(1, min(_MOST_TIMES, _LEAST // len(dump.lengths if tokens is None else tokens)))
    names = ("rows", "lengths", "advantages")
    many = replace(dump, **{name: getattr(dump, name).repeat(times) for name in names})
    lengths = many.lengths
    if tokens is None:
        z = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        spread = sigma_hat(dump.log_ratio_sum, dump.lengths) * lengths.double().sqrt()
        return replace(many, log_ratio_sum=spread * z), "normal"
    sizes = tokens.repeat(times)
    signs = 2.0 * torch.randint(2, sizes.shape, generator=generator) - 1.0
    return replace(many, log_ratio=sizes * signs, log_ratio_sum=_totals(sizes * signs, lengths)), "signs"


def _totals(tokens: Tensor, lengths: Tensor) -> Tensor:
    """[N] sums over the tokens [T] of each response."""
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    return tokens.new_zeros(len(lengths)).index_add_(0, owner, tokens)
