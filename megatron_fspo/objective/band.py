"""Clip bands: limits on the sequence log-ratio S as a function of the response length L.

Shapes: N sequences. Units: S and all limits in nats, L in response tokens. A band does not depend on
advantages; the surrogate decides which of its sides clips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

DEFAULT_C = 0.03
"""Default c_low and c_high of FSPO's band, in nats per √token."""
WIDE_C = 0.2
"""A c from which a band allows a ratio of e^6.3 at 1000 tokens: probably meant as a limit on a ratio."""


class ClipBand(Protocol):
    """Limits low <= S <= high, and the importance ratio exp(scale·S) that they belong to."""

    @property
    def drift(self) -> float:
        """Centre of the band, in nats per token."""

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return (low [N], high [N]), limits on S in nats: float32, or the dtype of floating ``lengths``."""

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        """Return scale [N] of the importance ratio exp(scale·S): 1 for e^S, 1/L for GSPO's e^(S/L)."""


class DualClip(Protocol):
    """An upper limit on S for A < 0, where PPO's minimum leaves ratio·A unbounded below."""

    def log_bound(self, lengths: Tensor, scale: Tensor) -> Tensor:
        """Return the upper limit [N] on S in nats; ``scale`` [N] is the band's ``log_ratio_scale``."""


@dataclass(frozen=True, kw_only=True)
class FSPOBand:
    """FSPO's band: −c_low·L^a + drift·L <= S <= c_high·L^a + drift·L, with ratio e^S.

    If token log-ratios are independent, S is asymptotically normal with a variance proportional to L. With
    a = ½, the share of sequences outside is then the same at every length.

    Example::

        FSPOBand(c_low=0.03, c_high=0.03)

    Source: the √L band is in the abstracts of arXiv 2509.09177, a KL-corrected drift term in that of v1.
    Second-hand: c_low ≠ c_high, c near 0.03, drift ≈ 0. Ours: the form of the drift, other exponents.
    Raises ``ValueError`` naming the invalid field.
    """

    c_low: float
    """Nats per token^a, above 0. About 2σ̂, see ``calibration``."""
    c_high: float
    drift: float = 0.0
    """Centre of the band in nats per token: 0, or −KL(old‖new), as ``calibration.expected_drift``."""
    exponent: float = 0.5
    """a, from 0 (constant band) to 1 (band on the mean log-ratio S/L)."""

    def __post_init__(self) -> None:
        require_positive("FSPOBand.c_low", self.c_low)
        require_positive("FSPOBand.c_high", self.c_high)
        _require_shape("FSPOBand", self.drift, self.exponent)

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = _floating(lengths)
        centre, unit = self.drift * length, length**self.exponent
        return centre - self.c_low * unit, centre + self.c_high * unit

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        return torch.ones_like(_floating(lengths))


@dataclass(frozen=True, kw_only=True)
class _RatioBand:
    """Limits on an importance ratio around 1."""

    drift: ClassVar[float] = 0.0
    eps_low: float
    eps_high: float

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require_positive(f"{owner}.eps_low", self.eps_low)
        require_positive(f"{owner}.eps_high", self.eps_high)
        if self.eps_low >= 1.0:
            raise ValueError(f"{owner}.eps_low must be below 1, got {self.eps_low}")


@dataclass(frozen=True, kw_only=True)
class RLOOBand(_RatioBand):
    """Constant limits log(1 − eps_low) <= S <= log(1 + eps_high), with ratio e^S.

    Source: PPO's clip on the ratio of the whole sequence, with ε = 0.2 as in TRL's RLOO (arXiv 2402.14740).
    Raises ``ValueError`` unless 0 < eps_low < 1 and eps_high > 0.
    """

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(_floating(lengths))
        return one * math.log1p(-self.eps_low), one * math.log1p(self.eps_high)

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        return torch.ones_like(_floating(lengths))


@dataclass(frozen=True, kw_only=True)
class GSPOBand(_RatioBand):
    """Limits on the mean log-ratio: L·log(1 − eps_low) <= S <= L·log(1 + eps_high), with ratio e^(S/L).

    Source: GSPO (arXiv 2507.18071), with limits of 3e-4 and 4e-4. PPO's usual 0.2 never clips here.
    Raises ``ValueError`` unless 0 < eps_low < 1 and eps_high > 0.
    """

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = _floating(lengths)
        return length * math.log1p(-self.eps_low), length * math.log1p(self.eps_high)

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        # An empty response has no mean. Any finite scale will do: the surrogate ignores the response.
        return 1.0 / _floating(lengths).clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class LengthFairDualClip:
    """Dual clip S <= c·L^a + drift·L for A < 0, which clips the same share of sequences at every length.

    Give it the exponent and drift of the band, and about twice its c_high. Source: ours.
    Raises ``ValueError`` naming the invalid field.
    """

    c: float
    exponent: float = 0.5
    drift: float = 0.0

    def __post_init__(self) -> None:
        require_positive("LengthFairDualClip.c", self.c)
        _require_shape("LengthFairDualClip", self.drift, self.exponent)

    def log_bound(self, lengths: Tensor, scale: Tensor) -> Tensor:
        length = _floating(lengths)
        return self.c * length**self.exponent + self.drift * length


@dataclass(frozen=True, kw_only=True)
class ConstantDualClip:
    """Dual clip exp(scale·S) <= ratio for A < 0, that is S <= log(ratio)/scale.

    It limits the band's own ratio: e^S for FSPO and RLOO, e^(S/L) for GSPO. A constant limit on e^S clips
    long sequences first: with c = 0.03, the edge of FSPO's band itself exceeds 3.0 for L > 1,340.
    Source: dual-clip PPO (arXiv 1912.09729). Raises ``ValueError`` unless ratio > 1.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 1.0 < self.ratio < math.inf:
            raise ValueError(f"ConstantDualClip.ratio must be finite and above 1, got {self.ratio}")

    def log_bound(self, lengths: Tensor, scale: Tensor) -> Tensor:
        return math.log(self.ratio) / scale


def _floating(lengths: Tensor) -> Tensor:
    return lengths if lengths.is_floating_point() else lengths.float()


def require_positive(field: str, value: float) -> None:
    """Raise ``ValueError`` naming the field unless its value is finite and above 0."""
    if not 0.0 < value < math.inf:
        raise ValueError(f"{field} must be finite and above 0, got {value}")


def _require_shape(owner: str, drift: float, exponent: float) -> None:
    if not math.isfinite(drift):
        raise ValueError(f"{owner}.drift must be finite, got {drift}")
    if not 0.0 <= exponent <= 1.0:
        raise ValueError(f"{owner}.exponent must be from 0 to 1, got {exponent}")
