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
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.objective.band import ClipBand
from megatron_fspo.objective.calibration import sigma_hat, usable

_MAX_KEPT = 1024
"""Responses whose Z is kept, of a larger number."""
_NEAREST = 64
"""Responses that stand for a length, or a quarter of all where that is more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """The noise between two passes over the same responses."""

    drift: float
    """Nats per token: Σ S / Σ L."""
    lengths: Tensor
    """[n] float64, L of the responses, ascending."""
    residuals: Tensor
    """[n] float64, Z of each response."""

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
        different, positions = torch.unique(lengths.detach().cpu().double(), return_inverse=True)
        low, high = band.bounds(different)
        rates = []
        for length, below, above in zip(different.tolist(), low.tolist(), high.tolist(), strict=True):
            sums = self._near(length) * math.sqrt(length) + self.drift * length
            rates.append(((sums < below) | (sums > above)).double().mean() if length else torch.zeros(()))
        return torch.tensor(rates, dtype=torch.float64)[positions]

    def smallest_c(self, share: float, length: int, *, centred: bool = False) -> float:
        """The smallest c of a band ±c·√L, or with ``centred`` about this drift, that leaves at most this
        share, in [0, 1), of responses of ``length`` tokens outside, by noise alone."""
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


def variance_share(part: Tensor, log_ratio_sums: Tensor, lengths: Tensor) -> float:
    """The share of the variance of S/√L that goes with a part of S: Cov(part/√L, S/√L) / Var(S/√L).

    Takes both [N] in nats and L [N]. S and the part are not centred on their means, which grow with L, but
    each on its drift·L. Below 0 or above 1 where part and rest go against each other; NaN where nothing
    spreads.
    """
    lengths = lengths.double()
    both = torch.stack([part, log_ratio_sums])
    of_part, whole = (both - both.sum(1, keepdim=True) / lengths.sum() * lengths) / lengths.sqrt()
    share: float = ((of_part * whole).sum() / whole.square().sum()).item()
    return share


def two_sigma(log_ratio_sums: Tensor, lengths: Tensor) -> float:
    """c = 2 sigma-hat, as a run calibrates itself; NaN where no response can say."""
    sums, kept = usable(log_ratio_sums, lengths)
    return 2.0 * sigma_hat(sums, kept) if len(sums) else math.nan
