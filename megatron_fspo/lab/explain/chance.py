"""The null floor and the interval of LRE from counts: the same for a million rows as for a thousand.

:func:`~megatron_fspo.objective.length_reweighting_error` permutes and resamples rows one by one. What
that does to the counts of a bin has a known distribution, which is drawn from here. Rows of one cluster (a
prompt, or a response that several updates saw) are accepted together: deviations that are drawn as if rows
were independent are widened by the root of the design effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_fspo.objective import LengthReweightingError, length_reweighting_error
from megatron_fspo.objective.fairness import length_bins

NUM_BINS = 8
_DRAWS = 1000


def lre_of(accepted: Tensor, lengths: Tensor, clusters: Tensor, seed: int = 0) -> LengthReweightingError:
    """LRE of ``accepted`` [N] bool over ``lengths`` [N], with null floor and 95% intervals.

    Args:
        clusters: [N] int64, from 0: rows of different clusters are independent.
    """
    found = length_reweighting_error(accepted, lengths, NUM_BINS, permutations=0, bootstrap=0)
    total = int((lengths > 0).sum())
    counts = np.array([round(bin.share * total) for bin in found.bins])
    passed = np.array([round(bin.accepted_rate * n) for bin, n in zip(found.bins, counts, strict=True)])
    if not passed.sum():
        return found
    widening = design_effect(accepted, lengths, clusters) ** 0.5
    random = np.random.default_rng(seed)
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
        found,
        null_mean=float(null_mean.mean()),
        null_max=float(null_max.mean()),
        mean_interval=_interval(means),
        max_interval=_interval(maxima),
    )


def design_effect(accepted: Tensor, lengths: Tensor, clusters: Tensor) -> float:
    """By how much clusters [N] raise the variance of the bins' acceptance rates; at least 1.

    The variance over clusters of what each adds to a bin's rate less the overall one, over that of
    independent rows (Kish's design effect), both averaged over bins by their shares. Taken about the overall
    rate, as if length did not matter: where each length is a prompt of its own, the two cannot be told apart.
    """
    full = lengths > 0
    bins = length_bins(lengths[full], NUM_BINS)
    flags, groups = accepted[full].double(), clusters[full].unique(return_inverse=True)[1]
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
    return max(1.0, number / (number - 1) * (counts * added.square().sum(0)).sum().item() / wanted)


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
