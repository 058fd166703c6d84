"""The null floor and the interval of LRE from counts: the same for a million responses as for a thousand.

:func:`~megatron_fspo.objective.length_reweighting_error` permutes and resamples responses one by one. What
that does to the counts of a bin has a known distribution, which is drawn from here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_fspo.objective import LengthReweightingError, length_reweighting_error

_DRAWS = 1000


def lre_of(accepted: Tensor, lengths: Tensor, seed: int = 0) -> LengthReweightingError:
    """LRE of ``accepted`` [N] bool over ``lengths`` [N], with null floor and 95% intervals."""
    found = length_reweighting_error(accepted, lengths, permutations=0, bootstrap=0)
    total = int((lengths > 0).sum())
    counts = np.array([round(bin.share * total) for bin in found.bins])
    passed = np.array([round(bin.accepted_rate * n) for bin, n in zip(found.bins, counts, strict=True)])
    if not passed.sum():
        return found
    random = np.random.default_rng(seed)
    # Flags permuted: which bins the accepted ones fall into.
    null = random.multivariate_hypergeometric(counts, int(passed.sum()), size=_DRAWS)
    null_mean, null_max = _errors(np.broadcast_to(counts, null.shape), null)
    # Responses resampled: how many of each bin, accepted and not.
    cells = np.concatenate([passed, counts - passed])
    drawn = random.multinomial(total, cells / total, size=_DRAWS)
    accepted_again = drawn[:, : len(counts)]
    means, maxima = _errors(accepted_again + drawn[:, len(counts) :], accepted_again)
    return replace(
        found,
        null_mean=float(null_mean.mean()),
        null_max=float(null_max.mean()),
        mean_interval=_interval(means),
        max_interval=_interval(maxima),
    )


def _errors(counts: npt.NDArray[Any], passed: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """LRE mean and max [draws] of responses and accepted responses [draws, B]."""
    total = counts.sum(1, keepdims=True)
    overall = passed.sum(1, keepdims=True) / total
    # A bin that a draw missed has no rate and no share. A draw with nothing accepted is nan.
    with np.errstate(invalid="ignore"):
        error = np.abs(passed / np.maximum(counts, 1) / overall - 1.0) * (counts > 0)
    return (counts / total * error).sum(1), error.max(1)


def _interval(values: npt.NDArray[Any]) -> tuple[float, float]:
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)
