"""RLOO, GSPO and LUSPO: sequence-level losses with limits on an importance ratio."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss, pessimistic_minimum
from megatron_fspo.objective import ClipBand, ConstantDualClip, GSPOBand, RLOOBand, SequenceLevel
from megatron_fspo.section import UnitInterval

_MOST_NATS = 36.0
"""Beyond 37 nats, 1 − eps_low is 0 in float64."""


def scaled_limits(eps_low: float, eps_high: float, factor: float) -> dict[str, float]:
    """Return the keys of limits that are ``factor`` times as wide in nats."""
    low, high = factor * math.log1p(-eps_low), factor * math.log1p(eps_high)
    return {"eps_low": -math.expm1(low), "eps_high": math.expm1(high)}


def widest_limits(eps_low: float, eps_high: float) -> float:
    """Return the largest factor for :func:`scaled_limits`."""
    return _MOST_NATS / max(-math.log1p(-eps_low), math.log1p(eps_high))


class RatioLoss(Loss):
    """Base class: limits on an importance ratio of the whole response."""

    LIMITS: ClassVar = ("eps_low", "eps_high")
    MEAN: ClassVar = False
    """True: the ratio is e^(S/L). False: it is e^S."""

    eps_low: UnitInterval
    eps_high: PositiveFloat
    dual_clip_ratio: Annotated[float, Field(gt=1)] | None = Field(
        None, description="upper limit of the ratio for A < 0"
    )

    def band(self) -> ClipBand:
        raise NotImplementedError

    def objective(self) -> SequenceLevel:
        ratio = self.dual_clip_ratio
        dual_clip = None if ratio is None else ConstantDualClip(ratio=ratio)
        return SequenceLevel(band=self.band(), dual_clip=dual_clip)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        x = (log_ratio.mean() if self.MEAN else log_ratio.sum())[None]
        ratio = x.exp()
        held = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        limit = None if self.dual_clip_ratio is None else x.new_tensor(self.dual_clip_ratio)
        objective, clipped = pessimistic_minimum(x, advantage, ratio, held, limit)
        return Definition(objective=objective, clipped=clipped, out_of_band=bool(ratio != held))

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update=scaled_limits(self.eps_low, self.eps_high, factor))

    def widest(self) -> float:
        return widest_limits(self.eps_low, self.eps_high)


class RLOOLoss(RatioLoss):
    """RLOO (2402.14740): clip e^S to constant limits, as in TRL.

    `J = min(r A, clip(r) A)`, r = e^S; mean over sequences.
    """

    VERIFIED: ClassVar = {"rloo": {"dual_clip_ratio": 1.3}}

    name: Literal["rloo"] = "rloo"
    eps_low: UnitInterval = Field(0.2, description="exp(S) >= 1 - eps_low")
    eps_high: PositiveFloat = Field(0.2, description="exp(S) <= 1 + eps_high")

    def band(self) -> RLOOBand:
        return RLOOBand(eps_low=self.eps_low, eps_high=self.eps_high)


class MeanRatioLoss(RatioLoss):
    """Base class: limits on the length-normalised ratio e^(S/L)."""

    MEAN: ClassVar = True

    eps_low: UnitInterval = Field(3e-4, description="exp(S / L) >= 1 - eps_low")
    eps_high: PositiveFloat = Field(4e-4, description="exp(S / L) <= 1 + eps_high")

    def band(self) -> GSPOBand:
        return GSPOBand(eps_low=self.eps_low, eps_high=self.eps_high)


class GSPOLoss(MeanRatioLoss):
    """GSPO (2507.18071): clip the length-normalised ratio e^(S / L).

    `J = min(r A, clip(r) A)`, r = e^(S / L); mean over sequences.
    """

    VERIFIED: ClassVar = {
        "gspo": {"eps_low": 0.01, "eps_high": 0.01},
        "gspo-entropy": {"eps_low": 0.01, "eps_high": 0.01, "entropy_coef": 0.5},
    }

    name: Literal["gspo"] = "gspo"


class LUSPOLoss(MeanRatioLoss):
    """LUSPO (2602.05261): GSPO with J multiplied by L, and GSPO's default limits.

    The gradient of a response then has no factor 1 / L.
    """

    VERIFIED: ClassVar = {"luspo": {"eps_low": 0.01, "eps_high": 0.01}}
    COMPARED: ClassVar = False

    name: Literal["luspo"] = "luspo"

    def objective(self) -> SequenceLevel:
        return replace(super().objective(), times_length=True)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        plain = super().definition(log_ratio, advantage, log_probs)
        return replace(plain, objective=len(log_ratio) * plain.objective)
