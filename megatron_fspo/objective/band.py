"""Where the clip sits: limits on the sequence log-ratio S, as a function of the response length L.

Shapes: N sequences. Units: S and all limits are in nats; L counts response tokens.
A band knows nothing of advantages; which of its sides clips is the surrogate's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

DEFAULT_C = 0.03
"""Both sides of FSPO's band where nothing else is given, in nats per √token."""


class ClipBand(Protocol):
    """A band low <= S <= high, and the importance ratio exp(scale·S) that it belongs to."""

    @property
    def drift(self) -> float:
        """Centre of the band in nats per token."""

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(low [N], high [N]) on S in nats: float32, or the dtype of ``lengths`` if that is floating."""

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        """scale [N] of the importance ratio exp(scale·S): 1 for a ratio of sequences, 1/L for GSPO's mean."""


class DualClip(Protocol):
    """A second limit, used for A < 0 only, where the min-form leaves ratio·A unbounded below."""

    def log_bound(self, lengths: Tensor, scale: Tensor) -> Tensor:
        """Upper limit [N] on S in nats; ``scale`` [N] is the band's ``log_ratio_scale`` for these lengths."""


@dataclass(frozen=True, kw_only=True)
class FSPOBand:
    """−c_low·w(L) + drift·L <= S <= c_high·w(L) + drift·L, with ratio exp(S); w is :func:`width`.

    S is asymptotically normal with a variance in proportion to L, so with w = √L the share of sequences
    outside is the same at every length. What an update gives to all tokens of a response adds up faster:
    with a variance of n²·L + s²·L² it is the same with w = √(L + L²/L*), L* = n²/s².

    Example::

        FSPOBand(c_low=0.03, c_high=0.03)

    Source: the √L band and a KL-corrected drift term are in the abstracts of arXiv 2509.09177 [seen]; the two
    sides, c near 0.03 and drift ≈ 0 are second-hand; the form of the drift, the free
    exponent and L* are ours.
    Raises ``ValueError`` naming the field that is not legal.
    """

    c_low: float
    """Nats per token^a, above 0. About twice the noise of S/√L: see ``calibration``."""
    c_high: float
    drift: float = 0.0
    """Centre of the band in nats per token: 0, or −KL(old‖new) from ``calibration.drift_from_*``."""
    exponent: float = 0.5
    """a, from 0 (a constant band) to 1 (a band on the mean log-ratio)."""
    crossover: float | None = None
    """L* in tokens; None for no such part of S."""

    def __post_init__(self) -> None:
        require_positive("FSPOBand.c_low", self.c_low)
        require_positive("FSPOBand.c_high", self.c_high)
        _require_shape("FSPOBand", self.drift, self.exponent, self.crossover)

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = _floating(lengths)
        centre, unit = self.drift * length, width(length, self.exponent, self.crossover)
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
    """log(1 − eps_low) <= S <= log(1 + eps_high), with ratio exp(S): one width for every length.

    Source: PPO's clip on the ratio of the whole sequence, as TRL runs RLOO (arXiv 2402.14740), with ε = 0.2.
    Raises ``ValueError`` unless 0 < eps_low < 1 and eps_high > 0.
    """

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(_floating(lengths))
        return one * math.log1p(-self.eps_low), one * math.log1p(self.eps_high)

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        return torch.ones_like(_floating(lengths))


@dataclass(frozen=True, kw_only=True)
class GSPOBand(_RatioBand):
    """1 − eps_low <= exp(S/L) <= 1 + eps_high; on S that is L·log(1 − eps_low) <= S <= L·log(1 + eps_high).

    Source: GSPO (arXiv 2507.18071), which clips at 3e-4 and 4e-4. A PPO-like 0.2 never clips here.
    Raises ``ValueError`` unless 0 < eps_low < 1 and eps_high > 0.
    """

    def bounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = _floating(lengths)
        return length * math.log1p(-self.eps_low), length * math.log1p(self.eps_high)

    def log_ratio_scale(self, lengths: Tensor) -> Tensor:
        # An empty response has no mean; any finite scale will do, the surrogate leaves it out.
        return 1.0 / _floating(lengths).clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class LengthFairDualClip:
    """S <= c·w(L) + drift·L for A < 0: acts on the same share of sequences at every length.

    Give it the band's exponent, L* and drift, and about twice the band's c. Source: ours.
    Raises ``ValueError`` naming the field that is not legal.
    """

    c: float
    exponent: float = 0.5
    drift: float = 0.0
    crossover: float | None = None

    def __post_init__(self) -> None:
        require_positive("LengthFairDualClip.c", self.c)
        _require_shape("LengthFairDualClip", self.drift, self.exponent, self.crossover)

    def log_bound(self, lengths: Tensor, scale: Tensor) -> Tensor:
        length = _floating(lengths)
        return self.c * width(length, self.exponent, self.crossover) + self.drift * length


@dataclass(frozen=True, kw_only=True)
class ConstantDualClip:
    """exp(scale·S) <= ratio for A < 0, so S <= log(ratio)/scale.

    The limit is on the band's own importance ratio: exp(S) for FSPO and RLOO, exp(S/L) for GSPO. On exp(S) it
    is unfair to length: with c = 0.03 even the edge of FSPO's band passes 3.0 from L ≈ 1,340 on.
    Source: dual-clip PPO (arXiv 1912.09729). Raises ``ValueError`` unless ratio > 1.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 1.0 < self.ratio < math.inf:
            raise ValueError(f"ConstantDualClip.ratio must be finite and above 1, got {self.ratio}")

    def log_bound(self, lengths: Tensor, scale: Tensor) -> Tensor:
        return math.log(self.ratio) / scale


def width(lengths: Tensor, exponent: float = 0.5, crossover: float | None = None) -> Tensor:
    """w(L) [N] of floating L [N]: L^a, or with L* L^a·√(1 + L/L*), which is √(L + L²/L*) for a = ½."""
    unit = lengths**exponent
    return unit if crossover is None else unit * (1 + lengths / crossover).sqrt()


def _floating(lengths: Tensor) -> Tensor:
    return lengths if lengths.is_floating_point() else lengths.float()


def require_positive(field: str, value: float) -> None:
    """Raise ``ValueError``, with the name of the field, unless its value is finite and above 0."""
    if not 0.0 < value < math.inf:
        raise ValueError(f"{field} must be finite and above 0, got {value}")


def _require_shape(owner: str, drift: float, exponent: float, crossover: float | None) -> None:
    if not math.isfinite(drift):
        raise ValueError(f"{owner}.drift must be finite, got {drift}")
    if not 0.0 <= exponent <= 1.0:
        raise ValueError(f"{owner}.exponent must be from 0 to 1, got {exponent}")
    if crossover is not None:
        require_positive(f"{owner}.crossover", crossover)
