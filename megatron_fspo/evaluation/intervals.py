"""95% intervals: one result type, and one function for each method.

Responses to one problem are alike: they are right together or wrong together. So problems are what is drawn,
each with all its responses. With several sets problems are drawn within each, and the estimate is the mean
over the sets of their means.

Either end is the outer one of two. BCa (bias-corrected and accelerated; Efron 1987) follows skew, as of
accuracies near 0 or 1; it is widened for few problems as Hesterberg (2015) does it, by √(P/(P − 1)) and t
quantiles. The t interval holds where the skew is of problems that were not drawn, as of a gain that a few
make. Both together hold the truth of populations of 9 to 100 problems 94 to 97% of the time
(``benchmarks/interval_coverage.py``). The random stream of a set has its name, so that a set's interval does
not depend on which others there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev

import numpy as np
import torch
from torch import Tensor

from megatron_fspo.evaluation.estimators import Array
from megatron_fspo.objective.calibration import jackknife, student_t

LEVEL = 0.95
RESAMPLES = 10_000
_BLOCK = 2**22
"""Drawn problems that are held at once."""
_NORMAL = NormalDist()
_NORMAL_END = _NORMAL.inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 95% interval.

    Example::

        Estimate(value=0.652, low=0.571, high=0.726)
    """

    value: float
    low: float
    """NaN, as ``high``, where there is no interval: a single problem, prompt or seed."""
    high: float


def wilson_interval(rate: float, count: int) -> Estimate:
    """A share of ``count`` independent records."""
    z2 = 1.96**2
    centre = (rate + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (rate * (1 - rate) + z2 / (4 * count)) / count) / (1 + z2 / count)
    return Estimate(value=rate, low=centre - half, high=centre + half)


def t_half_width(values: Sequence[float]) -> float:
    """Half the width of the t interval of a mean of independent normal values; NaN for a single one."""
    if len(values) < 2:
        return math.nan
    return student_t(len(values) - 1) * (stdev(values) / math.sqrt(len(values)))


def jackknife_interval(value: float, left: Sequence[float]) -> Estimate:
    """A figure, from its values with one of at least 2 groups after the other left out."""
    half = student_t(len(left) - 1) * jackknife(list(left))
    return Estimate(value=value, low=value - half, high=value + half)


def resample_groups(
    statistics: Callable[[Tensor, Tensor], Sequence[float]],
    log_ratio_sums: Tensor,
    lengths: Tensor,
    groups: Tensor,
    *,
    resamples: int = 400,
    seed: int = 0,
) -> list[Estimate]:
    """Statistics of S [N] and L [N], each with its interval, by resampling groups with all their responses.

    Args:
        statistics: takes S and L of some responses and returns the same number of figures each time.
        log_ratio_sums: S [N], nats.
        lengths: L [N], tokens.
        groups: [N] int64, the prompt of each: responses to one prompt are alike.
        resamples: how often groups are drawn anew.
        seed: seeds a generator of its own.
    """
    members = [torch.nonzero(groups == group)[:, 0] for group in sorted(set(groups.tolist()))]
    random = torch.Generator().manual_seed(seed)
    drawn: list[Sequence[float]] = []
    for _ in range(resamples if len(members) > 1 else 0):
        picks = torch.randint(len(members), (len(members),), generator=random).tolist()
        rows = torch.cat([members[pick] for pick in picks])
        drawn.append(statistics(log_ratio_sums[rows], lengths[rows]))
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    estimates = []
    for number, value in enumerate(statistics(log_ratio_sums, lengths)):
        finite = [row[number] for row in drawn if math.isfinite(row[number])]
        values = torch.tensor(finite, dtype=torch.float64)
        low, high = values.quantile(edges).tolist() if finite else (math.nan, math.nan)
        estimates.append(Estimate(value=value, low=low, high=high))
    return estimates


def interval_of_means(
    sets: Mapping[str, Array], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[Estimate]:
    """Mean over the sets of the mean over their problems, with a 95 % interval: one estimate per quantity.

    ``sets`` are by name, [problems, quantities], with the same quantities everywhere; all are resampled
    together. The random stream has the name of the set and ``seed``.

    Raises:
        ValueError: no set, or one without problems.
    """
    if not sets or not all(len(values) for values in sets.values()):
        raise ValueError("an interval needs a set, and every set problems")
    tables = [np.asarray(values, dtype=np.float64) for values in sets.values()]
    # Deviations from the first problem, then from the mean: equal problems give exactly their value, and 0.
    means = [values[0] + (values - values[0]).mean(0) for values in tables]
    centred = [values - mean for values, mean in zip(tables, means, strict=True)]
    share = 1 / len(tables)
    drawn = [
        _resampled(values, f"{seed}/bootstrap/{name}", resamples)
        for name, values in zip(sets, centred, strict=True)
    ]
    moved = share * np.sum(drawn, axis=0)
    influence = np.concatenate([share / len(values) * values for values in centred])
    lone = any(len(values) == 1 for values in tables)
    lowest, highest = (
        share * np.sum([pick(values, 0) for values in centred], 0) for pick in (np.min, np.max)
    )
    freedom = [max(len(values) - 1, 1) for values in tables]
    variances = share**2 * np.array(
        [(values**2).mean(0) / free for values, free in zip(centred, freedom, strict=True)]
    )
    estimates = []
    for number, value in enumerate((share * np.sum(means, axis=0)).tolist()):
        low = high = math.nan if lone else 0.0
        if not lone and (variance := float(variances[:, number].sum())):
            # Welch and Satterthwaite's, of several sets.
            degrees = variance**2 / float((variances[:, number] ** 2 / freedom).sum())
            half = student_t(degrees) * math.sqrt(variance)
            wide = half / (_NORMAL_END * math.sqrt(float((influence[:, number] ** 2).sum())))
            low, high = _bca(moved[:, number], influence[:, number], wide)
            # A mean is not beyond the most extreme problems.
            low, high = max(min(low, -half), lowest[number]), min(max(high, half), highest[number])
        estimates.append(Estimate(value=value, low=value + float(low), high=value + float(high)))
    return estimates


def _resampled(centred: Array, stream: str, resamples: int) -> Array:
    """Means [resamples, quantities] of as many problems, drawn with replacement from the stream named so."""
    digest = hashlib.blake2b(stream.encode(), digest_size=16).digest()
    random = np.random.default_rng(int.from_bytes(digest, "little"))
    problems = len(centred)
    rows = max(1, _BLOCK // problems)
    blocks = []
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        drawn = random.integers(problems, size=(count, problems))
        drawn += np.arange(count)[:, None] * problems
        times = np.bincount(drawn.ravel(), minlength=count * problems).reshape(count, problems)
        blocks.append(times @ centred / problems)
    return np.concatenate(blocks)


def _bca(moved: Array, influence: Array, wide: float) -> tuple[float, float]:
    """Ends of the interval, as differences from the estimate: from those of resampled estimates [resamples],
    the influence of each problem [problems], and a factor on the normal quantiles, for few problems."""
    acceleration = float((influence**3).sum()) / (6 * float((influence**2).sum()) ** 1.5)
    # Where resamples hit the estimate itself, half of them count as below it.
    below = ((moved < 0).mean() + (moved <= 0).mean()) / 2
    bias = _NORMAL.inv_cdf(min(max(float(below), 0.5 / len(moved)), 1 - 0.5 / len(moved)))
    tail = (1 - LEVEL) / 2
    shares = []
    for side in (tail, 1 - tail):
        shifted = bias + wide * _NORMAL.inv_cdf(side)
        # Beyond the pole, where the formula turns over, the end is that of all resamples.
        bent = 1 - acceleration * shifted
        shares.append(_NORMAL.cdf(bias + shifted / bent) if bent > 0 else float(shifted > 0))
    low, high = np.quantile(moved, shares)
    return float(low), float(high)
