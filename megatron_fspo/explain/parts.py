"""S taken apart by the halves of each response, where the tokens are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_fspo.explain.dump import Dump
from megatron_fspo.objective.decomposition import Decomposition, decompose, halves_of
from megatron_fspo.objective.exponent import jackknife, student_t

_BLOCKS = 20
_LEAST = 5 * _BLOCKS


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its 95% interval, from one twentieth of the responses after the other left out."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Parts:
    """See :mod:`megatron_fspo.objective.decomposition`."""

    noise: Figure
    """Nats per √token."""
    signal: Figure
    """Nats per token."""
    drift: Figure
    """Nats per token."""
    crossover: float
    """L*, tokens; infinite without a signal."""
    median: int
    """Of L."""
    exponent: Figure
    """a of spread(S) ∝ L^a at the median."""


def take_apart(dump: Dump) -> Parts | None:
    """None where tokens are not known, or too few responses have any that differ."""
    if dump.log_ratio is None:
        return None
    halves = halves_of(dump.log_ratio, dump.lengths)
    count = len(halves.lengths)
    if count < _LEAST:
        return None
    blocks = torch.arange(count) % _BLOCKS
    try:
        whole = decompose(halves)
        left = [decompose(halves[blocks != block]) for block in range(_BLOCKS)]
    except ValueError:
        return None
    median = int(halves.lengths.median())

    def figure(of: Callable[[Decomposition], float]) -> Figure:
        half = student_t(_BLOCKS - 1) * jackknife([of(one) for one in left])
        return Figure(value=of(whole), low=of(whole) - half, high=of(whole) + half)

    return Parts(
        noise=figure(lambda one: one.noise),
        signal=figure(lambda one: one.signal),
        drift=figure(lambda one: one.drift),
        crossover=whole.crossover,
        median=median,
        exponent=figure(lambda one: one.exponent(median)),
    )
