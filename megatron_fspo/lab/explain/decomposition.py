"""S taken apart: what adds up along a response like noise, and what all its tokens share.

The log-ratio of token t of response i is taken as

    log_ratio_it = drift + u_i + e_it

with u_i common to the response (its advantage pushed all of it) and e_it independent beyond near neighbours.
Their sum over L tokens has

    Var(S | L) = noise² · L + signal² · L²

so it grows as √L while L is small against L* = (noise / signal)², and as L far above. The halves of a
response tell the two apart: what they share is u_i alone, and by what their means differ is e_it alone.

Shapes: N responses of at least 2 tokens. Units: S in nats, L in tokens, noise in nats per √token, signal and
drift in nats per token.
Source: all of this file is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.evaluation.intervals import Estimate, jackknife_interval
from megatron_fspo.objective.calibration import Exponent, measure_exponent

_BLOCKS = 20
_LEAST = 100
_LEAST_BLOCKS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Halves:
    """Sums over the first and the second half of each response."""

    first: Tensor
    """[N] float64, over the first L // 2 tokens."""
    second: Tensor
    """[N] float64, over the others."""
    lengths: Tensor
    """[N] int64, L, at least 2."""

    @property
    def log_ratio_sums(self) -> Tensor:
        """[N] S."""
        return self.first + self.second

    def __getitem__(self, rows: Tensor) -> Halves:
        return Halves(first=self.first[rows], second=self.second[rows], lengths=self.lengths[rows])


def split_halves(log_ratios: Tensor, lengths: Tensor) -> Halves:
    """Return the halves of responses from the log-ratios [T] of their tokens, response by response, in nats,
    and all lengths L [N]; responses of one token are left out."""
    ends = lengths.cumsum(0)
    middles = ends - lengths + lengths // 2
    sums = torch.cat([log_ratios.new_zeros(1, dtype=torch.float64), log_ratios.double().cumsum(0)])
    first, second = sums[middles] - sums[ends - lengths], sums[ends] - sums[middles]
    keep = lengths > 1
    return Halves(first=first[keep], second=second[keep], lengths=lengths[keep])


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """The parts of S."""

    drift: float
    """Common to all responses."""
    noise: float
    signal_squared: float
    """Below 0 where the halves of a response go against each other: by chance half of the time, of noise."""

    @property
    def signal(self) -> float:
        """0 where ``signal_squared`` is below."""
        return math.sqrt(max(self.signal_squared, 0.0))

    @property
    def crossover(self) -> float:
        """L* in tokens, at which both parts are equal; infinite without a signal."""
        return (self.noise / self.signal) ** 2 if self.signal else math.inf

    def exponent(self, length: float) -> float:
        """Return the a of spread ∝ L^a near this length: ½ far below L*, 1 far above; NaN if nothing spreads.

        Below ½ where ``signal_squared`` is below 0, so that its mean over draws is not too high.
        """
        noise, signal = self.noise**2, self.signal_squared * length
        return 0.5 + 0.5 * signal / (noise + signal) if noise + signal > 0 else math.nan


def decompose(halves: Halves) -> Decomposition:
    """Take S apart.

    Raises:
        ValueError: no response, or all tokens have the same log-ratio.
    """
    if not len(halves.lengths):
        raise ValueError("no response of at least 2 tokens")
    lengths = halves.lengths.double()
    early = (halves.lengths // 2).double()
    late = lengths - early
    drift = (halves.log_ratio_sums.sum() / lengths.sum()).item()
    first, second = halves.first - drift * early, halves.second - drift * late
    # Each response says as much of the noise as any other, whatever its length.
    noise = ((first / early - second / late).square() * early * late / lengths).mean().item()
    signal = ((first * second).sum() / (early * late).sum()).item()
    if noise <= 0 and signal <= 0:
        raise ValueError("all tokens have the same log-ratio: nothing spreads")
    return Decomposition(drift=drift, noise=math.sqrt(noise), signal_squared=signal)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of S in a dump, with intervals from one block of clusters after the other left out."""

    noise: Estimate
    """Nats per √token."""
    signal: Estimate
    """Nats per token; the ends are roots of those of its square, which may be below 0: then 0."""
    drift: Estimate
    """Nats per token."""
    crossover: float
    """L*, tokens; infinite without a signal."""
    median: int
    """Median L."""
    exponent: Estimate
    """The a of spread(S) ∝ L^a at the median."""


def assign_blocks(clusters: Tensor) -> Tensor:
    """Return [N] the block of each row, for intervals: all rows of a cluster in one."""
    positions: Tensor = torch.unique(clusters, return_inverse=True)[1]
    return positions % _BLOCKS


def growth(log_ratio_sums: Tensor, lengths: Tensor, clusters: Tensor) -> Exponent | str:
    """Return a in spread(S) ∝ L^a of S [N] and L [N], by clusters [N]; or why it cannot be measured."""
    try:
        return measure_exponent(log_ratio_sums, lengths, assign_blocks(clusters))
    except ValueError as error:
        return str(error)


def take_apart(log_ratios: Tensor, lengths: Tensor, clusters: Tensor) -> Parts | None:
    """Return the parts of S, from the log-ratios [T] of tokens, response by response, and lengths L [N]; None
    where too few responses or clusters differ. Rows of different clusters [N] int64 are independent."""
    halves = split_halves(log_ratios, lengths)
    blocks = assign_blocks(clusters[lengths > 1])
    if len(blocks) < _LEAST or (last := int(blocks.max())) < _LEAST_BLOCKS - 1:
        return None
    try:
        whole = decompose(halves)
        left = [decompose(halves[blocks != block]) for block in range(last + 1)]
    except ValueError:
        return None
    median = int(halves.lengths.median())

    def estimate(of: Callable[[Decomposition], float]) -> Estimate:
        return jackknife_interval(of(whole), [of(part) for part in left])

    squared = vars(estimate(lambda one: one.signal_squared))
    return Parts(
        noise=estimate(lambda one: one.noise),
        signal=Estimate(**{name: math.sqrt(max(value, 0.0)) for name, value in squared.items()}),
        drift=estimate(lambda one: one.drift),
        crossover=whole.crossover,
        median=median,
        exponent=estimate(lambda one: one.exponent(median)),
    )
