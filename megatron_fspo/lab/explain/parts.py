"""S taken apart by the halves of each response, where the tokens are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_fspo.lab.decomposition import Decomposition, decompose, halves_of
from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.objective.exponent import jackknife, student_t

_BLOCKS = 20
_LEAST = 100
_LEAST_BLOCKS = 10


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its 95% interval, from one block of clusters after the other left out."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Parts:
    """See :mod:`megatron_fspo.lab.decomposition`."""

    noise: Figure
    """Nats per √token."""
    signal: Figure
    """Nats per token; the ends are roots of those of its square, which may be below 0: then 0."""
    drift: Figure
    """Nats per token."""
    crossover: float
    """L*, tokens; infinite without a signal."""
    median: int
    """Of L."""
    exponent: Figure
    """a of spread(S) ∝ L^a at the median."""


def blocks_of(clusters: Tensor) -> Tensor:
    """[N] the block of each row, for intervals: all rows of a cluster in one."""
    return clusters.unique(return_inverse=True)[1] % _BLOCKS


def take_apart(dump: Dump) -> Parts | None:
    """None where tokens are not known, or too few responses or clusters have any that differ."""
    if dump.log_ratio is None:
        return None
    halves = halves_of(dump.log_ratio, dump.lengths)
    blocks = blocks_of(dump.clusters[dump.lengths > 1])
    if len(blocks) < _LEAST or int(blocks.max()) < _LEAST_BLOCKS - 1:
        return None
    number = int(blocks.max()) + 1
    try:
        whole = decompose(halves)
        left = [decompose(halves[blocks != block]) for block in range(number)]
    except ValueError:
        return None
    median = int(halves.lengths.median())

    def figure(of: Callable[[Decomposition], float], shown: Callable[[float], float] = float) -> Figure:
        half = student_t(number - 1) * jackknife([of(one) for one in left])
        return Figure(value=shown(of(whole)), low=shown(of(whole) - half), high=shown(of(whole) + half))

    return Parts(
        noise=figure(lambda one: one.noise),
        signal=figure(lambda one: one.signal_squared, lambda squared: math.sqrt(max(squared, 0.0))),
        drift=figure(lambda one: one.drift),
        crossover=whole.crossover,
        median=median,
        exponent=figure(lambda one: one.exponent(median)),
    )
