"""Noise in S, the part that is not learning: the same responses scored by two passes that should agree.

The passes differ in precision, kernels or packs, so their log-probs differ by Δ_t at token t. Over L tokens::

    S = Σ_t Δ_t ≈ drift·L + √L·Z,    E[Z²] = sigma²

and noise alone puts the share P(S outside the band) of these responses outside. Z has the measured
distribution of the responses nearest in length: a few tokens cause most of it, and short responses differ
from long ones in content. Beyond the longest response, Z stays that of the longest and S grows as √L.

If one of the passes sampled the responses, the drift is minus the KL divergence per token, about −sigma²/2.
It exceeds the spread from the drift length (sigma / drift)² ≈ 4 / sigma² on.

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
"""Largest number of responses whose Z is kept."""
_NEAREST = 64
"""Responses that represent a length, or a quarter of all if that is more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """The noise between two passes over the same responses."""

    drift: float
    """Nats per token: Σ S / Σ L."""
    lengths: Tensor
    """[n] float64: L of the responses, ascending."""
    residuals: Tensor
    """[n] float64: Z of each response."""
    of_sampler: bool = False
    """True if one of the passes sampled the responses."""

    @property
    def sigma(self) -> float:
        """Root mean square of Z."""
        return self.residuals.square().mean().sqrt().item()

    @property
    def spread(self) -> float:
        """σ̂ of Z, which rare large values do not move."""
        return sigma_hat(self.residuals, torch.ones_like(self.residuals))

    @property
    def drift_length(self) -> float:
        """Tokens at which the drift equals sigma·√L; infinite without drift."""
        return (self.sigma / self.drift) ** 2 if self.drift else math.inf

    @property
    def nearest(self) -> int:
        """Number of responses that represent a length."""
        return min(len(self.lengths), max(_NEAREST, len(self.lengths) // 4))

    def clip_rates(self, lengths: Tensor, band: ClipBand) -> Tensor:
        """Return the share [N] of responses of L [N] that noise alone puts outside the band; 0 for L = 0."""
        different, positions = torch.unique(lengths.detach().cpu().double(), return_inverse=True)
        low, high = band.bounds(different)
        rates = []
        for length, below, above in zip(different.tolist(), low.tolist(), high.tolist(), strict=True):
            sums = self._near(length) * math.sqrt(length) + self.drift * length
            rates.append(((sums < below) | (sums > above)).double().mean() if length else torch.zeros(()))
        return torch.tensor(rates, dtype=torch.float64)[positions]

    def smallest_c(self, share: float, length: int, *, centred: bool = False) -> float:
        """Return the smallest c of a band ±c·√L for which noise alone puts at most ``share``, in [0, 1), of
        the responses of ``length`` tokens outside. ``centred``: the band is centred on this drift."""
        shift = 0.0 if centred else self.drift * math.sqrt(length)
        sizes = self._near(length).add(shift).abs()
        return sizes.quantile(1.0 - share, interpolation="higher").item()

    def _near(self, length: float) -> Tensor:
        """Return Z of the responses nearest in length, by rank."""
        total, count = len(self.lengths), self.nearest
        begin, end = (int(torch.searchsorted(self.lengths, length, right=right)) for right in (False, True))
        first = min(max((begin + end - count) // 2, 0), total - count)
        return self.residuals[first : first + count]


def measure_noise(log_ratio_sums: Tensor, lengths: Tensor) -> Noise:
    """Return the noise of S [N] in nats over responses of L [N] tokens, ignoring empty and non-finite ones.
    Raises ``ValueError`` if none remains.
    """
    sums, lengths = usable(log_ratio_sums, lengths)
    if not len(sums):
        raise ValueError("no response has tokens and a finite S")
    drift = (sums.sum() / lengths.sum()).item()
    residuals = (sums - drift * lengths) / lengths.sqrt()
    order = lengths.argsort(stable=True)
    if len(order) > _MAX_KEPT:
        order = order[torch.linspace(0, len(order) - 1, _MAX_KEPT).long()]
    return Noise(drift=drift, lengths=lengths[order], residuals=residuals[order])


def variance_share(part: Tensor, log_ratio_sums: Tensor, lengths: Tensor) -> float:
    """Return the share of the variance of S/√L due to a part of S: Cov(part/√L, S/√L) / Var(S/√L).

    ``part`` and S are [N] in nats, each centred on its drift·L, as their means grow with L. The share is
    below 0 or above 1 if part and rest are anticorrelated, and NaN without any variance.
    """
    lengths = lengths.double()
    both = torch.stack([part, log_ratio_sums])
    of_part, whole = (both - both.sum(1, keepdim=True) / lengths.sum() * lengths) / lengths.sqrt()
    share: float = ((of_part * whole).sum() / whole.square().sum()).item()
    return share


def two_sigma(log_ratio_sums: Tensor, lengths: Tensor) -> float:
    """Return c = 2σ̂, as a run calibrates itself; NaN without a usable response."""
    sums, kept = usable(log_ratio_sums, lengths)
    return 2.0 * sigma_hat(sums, kept) if len(sums) else math.nan
