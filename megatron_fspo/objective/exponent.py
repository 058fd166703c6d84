"""How fast S spreads with length, measured: the exponent a of spread(S) ∝ L^a.

√L is the law of noise: independent terms. What training moves adds up along a response and grows faster,
up to L. A band on L^½ then clips long responses more often, so a run may measure a and use it instead.

The spread is taken from quantiles of |S| by length bin, not from variances: S has heavy tails, and a few
sequences would decide. It is the quantile at 0.7: the median says little of where the band's edge lies, and
the tail beyond 0.85 is too thin to measure in a few mini-batches. A law that is one power for every quantile
gives the same a for each.

Shapes: N sequences. Units: S in nats, L in response tokens; a has none.
Source: all of this file is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.objective.fairness import length_bins

QUANTILE = 0.7
"""The quantile of |S| within a length bin that stands for its spread."""
LEAST_SPAN = 3.0
"""Length of the longest bin over that of the shortest, below which no exponent is measured."""
_LEAST_BINS = 4
_LEAST_IN_BIN = 16


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """The exponent of S in some sequences."""

    value: float
    """a in spread(S) ∝ L^a."""
    interval: tuple[float, float]
    """95%, from leaving out one block after the other."""
    span: float
    """Mean length of the longest bin over that of the shortest."""

    def bounded(self) -> float:
        """The value, within what noise and a shift common to all tokens can give: from ½ to 1."""
        return min(max(self.value, 0.5), 1.0)


def usable(log_ratio_sums: Tensor, lengths: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """S and L in float64 on the CPU, and other columns, without empty responses and what is not finite."""
    sums, lengths = log_ratio_sums.detach().cpu().double(), lengths.detach().cpu().double()
    keep = sums.isfinite() & (lengths > 0)
    return sums[keep], lengths[keep], *(column.cpu()[keep] for column in more)


def fit_exponent(log_ratio_sums: Tensor, lengths: Tensor, num_bins: int = 8) -> float:
    """The exponent a in spread(S) ∝ L^a: the slope of the log quantile of |S| against log L over length bins.

    Takes S [N] in nats and L [N], and leaves out what is not finite or empty; least squares, one point per
    bin. Returns nan if fewer than two bins have a spread above 0. A random walk gives 0.5.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    points = _points(sums, kept, length_bins(kept, num_bins))
    return _slope(points) if len(points) > 1 else math.nan


def measure_exponent(log_ratio_sums: Tensor, lengths: Tensor, blocks: Tensor, num_bins: int = 8) -> Exponent:
    """The exponent of S with its interval, from sequences that several optimizer steps saw.

    Sequences of one step are moved by the same update, so steps are what is left out, one at a time (a
    delete-a-group jackknife), with the t quantile of their number.

    Args:
        log_ratio_sums: S [N] in nats.
        lengths: L [N].
        blocks: int64 [N], the optimizer step of each, or another group that goes together; at least 3.
        num_bins: bins of length, with equally many sequences.

    Raises:
        ValueError: fewer than 3 blocks; too few sequences with S ≠ 0; or lengths that span too little to say
            anything of growth.
    """
    numbers = sorted(set(blocks.tolist()))
    if len(numbers) < 3:
        raise ValueError(f"{len(numbers)} independent groups of sequences; an interval needs 3")
    sums, kept, steps = usable(log_ratio_sums, lengths, blocks)
    if (count := int((sums != 0).sum())) < _LEAST_BINS * _LEAST_IN_BIN:
        raise ValueError(f"{count} sequences with S other than 0; {_LEAST_BINS * _LEAST_IN_BIN} are needed")
    bins = length_bins(kept, num_bins)
    points = _points(sums, kept, bins)
    span = math.exp(points[-1][0] - points[0][0]) if points else 1.0
    if len(points) < _LEAST_BINS or span < LEAST_SPAN:
        raise ValueError(
            f"the lengths span too little: {len(points)} bins of different lengths, the longest {span:.2g} "
            f"times the shortest; {_LEAST_BINS} bins and {LEAST_SPAN:g} times are needed"
        )
    # The bins stay: edges that jump to another length would count as noise.
    left = [_slope(_points(*(part[steps != number] for part in (sums, kept, bins)))) for number in numbers]
    half = student_t(len(numbers) - 1) * jackknife(left)
    value = _slope(points)
    return Exponent(value=value, interval=(value - half, value + half), span=span)


def _points(sums: Tensor, lengths: Tensor, bins: Tensor) -> list[tuple[float, float]]:
    """(log L, log spread) of every bin that has one, short to long."""
    points = []
    for number in sorted(set(bins.tolist())):
        here = bins == number
        spread = sums[here].abs().quantile(QUANTILE).item()
        if spread > 0:
            points.append((lengths[here].log().mean().item(), math.log(spread)))
    return points


def _slope(points: list[tuple[float, float]]) -> float:
    x, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def jackknife(left: list[float]) -> float:
    """Standard error of a figure, from its values with one block after the other left out."""
    values = torch.tensor(left, dtype=torch.float64)
    return ((len(left) - 1) * values.var(correction=0)).sqrt().item()


def student_t(degrees: int) -> float:
    """97.5% quantile of Student's t: exact at 1 and 2 degrees, to 1% above (Abramowitz and Stegun 26.7.5)."""
    if degrees <= 2:
        return math.tan(math.pi * 0.475) if degrees == 1 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / degrees**power for power, term in enumerate(terms, start=1)))
