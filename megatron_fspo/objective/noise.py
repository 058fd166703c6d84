"""Noise in S that is no learning: the same responses, scored in two ways that should agree.

Two passes that differ in precision, kernels or packs give log-probs that differ by Δ_t at token t. Over a
response of L tokens their sum is

    S = Σ_t Δ_t ≈ drift·L + √L·Z,    E[Z²] = sigma²

so noise alone puts a share P(S outside the band) of the responses of that length outside. The distribution of
Z is the measured one, of the responses nearest in length: a few tokens carry most of it, and short responses
are other text than long ones. Beyond the longest it is that of the longest, and S grows as √L.

Where one of the passes sampled the responses, drift is minus the KL divergence per token, ≈ -sigma²/2, and
overtakes the spread at L* = (sigma / drift)² ≈ 4 / sigma².

Shapes: N responses. Units: nats; sigma in nats per √token.
Source: all of this file is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.objective.band import ClipBand
from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.objective.exponent import usable

_MAX_KEPT = 1024
"""Responses whose Z is kept, of a larger number."""
_NEAREST = 64
"""Responses that stand for a length, or a quarter of all where that is more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """Of two passes over the same responses."""

    drift: float
    """Nats per token: Σ S / Σ L."""
    lengths: Tensor
    """[n] float64, L of the responses, ascending."""
    residuals: Tensor
    """[n] float64, Z of each."""

    @property
    def sigma(self) -> float:
        """Root mean square of Z."""
        return self.residuals.square().mean().sqrt().item()

    @property
    def crossover(self) -> float:
        """L*, the length at which drift is as large as sigma·√L; infinite without drift."""
        return (self.sigma / self.drift) ** 2 if self.drift else math.inf

    @property
    def nearest(self) -> int:
        """Responses that stand for a length."""
        return min(len(self.lengths), max(_NEAREST, len(self.lengths) // 4))

    def clip_rates(self, lengths: Tensor, band: ClipBand) -> Tensor:
        """Share [N] of responses of ``lengths`` [N] that noise alone puts outside the band; 0 where L = 0."""
        found, places = lengths.detach().cpu().double().unique(return_inverse=True)
        low, high = band.bounds(found)
        rates = []
        for length, below, above in zip(found.tolist(), low.tolist(), high.tolist(), strict=True):
            sums = self._near(length) * math.sqrt(length) + self.drift * length
            rates.append(((sums < below) | (sums > above)).double().mean() if length else torch.zeros(()))
        return torch.tensor(rates, dtype=torch.float64)[places]

    def smallest_c(self, share: float, length: int, *, centred: bool = False) -> float:
        """The smallest c of a band ±c·√L that leaves at most this share of responses of so many tokens
        outside, by noise alone.

        Args:
            centred: of a band whose centre has this drift.
        """
        shift = 0.0 if centred else self.drift * math.sqrt(length)
        sizes = self._near(length).add(shift).abs()
        return sizes.quantile(1.0 - share, interpolation="higher").item()

    def _near(self, length: float) -> Tensor:
        """Z of the responses nearest in length, by rank."""
        total, count = len(self.lengths), self.nearest
        begin, end = (int(torch.searchsorted(self.lengths, length, right=right)) for right in (False, True))
        first = min(max((begin + end - count) // 2, 0), total - count)
        return self.residuals[first : first + count]


def noise_of(log_ratio_sums: Tensor, lengths: Tensor) -> Noise:
    """The noise of S [N] in nats over responses of L [N] tokens; empty and non-finite ones are left out.

    Raises ``ValueError`` if none is left.
    """
    sums, lengths = usable(log_ratio_sums, lengths)
    if not len(sums):
        raise ValueError("no response with tokens and a finite S")
    drift = (sums.sum() / lengths.sum()).item()
    residuals = (sums - drift * lengths) / lengths.sqrt()
    order = lengths.argsort(stable=True)
    if len(order) > _MAX_KEPT:
        order = order[torch.linspace(0, len(order) - 1, _MAX_KEPT).long()]
    return Noise(drift=drift, lengths=lengths[order], residuals=residuals[order])


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and its 95% interval; NaN where there is none."""

    value: float
    low: float
    high: float


def estimate(
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
        statistics: of the S and L of any of them, the same number of figures each time.
        groups: [N] int64, the prompt of each: responses to one prompt are alike.
        seed: of a generator of its own.
    """
    members = [torch.nonzero(groups == group)[:, 0] for group in groups.unique()]
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Sequence[float]] = []
    for _ in range(resamples if len(members) > 1 else 0):
        picks = torch.randint(len(members), (len(members),), generator=generator).tolist()
        rows = torch.cat([members[pick] for pick in picks])
        drawn.append(statistics(log_ratio_sums[rows], lengths[rows]))
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found = []
    for number, value in enumerate(statistics(log_ratio_sums, lengths)):
        values = torch.tensor(
            [row[number] for row in drawn if math.isfinite(row[number])], dtype=torch.float64
        )
        low, high = values.quantile(edges).tolist() if len(values) else (math.nan, math.nan)
        found.append(Estimate(value=value, low=low, high=high))
    return found


def two_sigma(log_ratio_sums: Tensor, lengths: Tensor) -> float:
    """c = 2 sigma-hat, as a run calibrates itself; NaN where no response can say."""
    sums, kept = usable(log_ratio_sums, lengths)
    return 2.0 * sigma_hat(sums, kept) if len(sums) else math.nan
