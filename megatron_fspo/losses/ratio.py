"""RLOO, GSPO and LUSPO: sequence-level losses whose limits lie on an importance ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss, pessimistic_minimum
from megatron_fspo.objective import ConstantDualClip, GSPOBand, RLOOBand, SequenceLevel
from megatron_fspo.section import UnitInterval

DualClipRatio = Annotated[float, Field(gt=1)] | None


class RLOOLoss(Loss):
    """RLOO (2402.14740) with a constant band on exp(S), as TRL clips it.

    J_i = min(r A, clip(r) A), r = e^S; mean over sequences.
    """

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {"rloo": {"dual_clip_ratio": 1.3}}

    name: Literal["rloo"] = "rloo"
    eps_low: UnitInterval = Field(0.2, description="exp(S) >= 1 - eps_low")
    eps_high: PositiveFloat = Field(0.2, description="exp(S) <= 1 + eps_high")
    dual_clip_ratio: DualClipRatio = Field(None, description="limit for A < 0")

    def band(self) -> RLOOBand:
        """The limits on S."""
        return RLOOBand(eps_low=self.eps_low, eps_high=self.eps_high)

    def objective(self) -> SequenceLevel:
        """The gradient weights of the loss."""
        return SequenceLevel(band=self.band(), dual_clip=_dual_clip(self.dual_clip_ratio))

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        """The loss of one response with log-ratios and log-probs [L], L > 0."""
        return _definition(self, log_ratio.sum()[None], advantage)


class MeanRatioLoss(Loss):
    """Limits on the length-normalised ratio exp(S / L)."""

    eps_low: UnitInterval = Field(3e-4, description="exp(S / L) >= 1 - eps_low")
    eps_high: PositiveFloat = Field(4e-4, description="exp(S / L) <= 1 + eps_high")
    dual_clip_ratio: DualClipRatio = Field(None, description="limit for A < 0")

    def band(self) -> GSPOBand:
        """The limits on S."""
        return GSPOBand(eps_low=self.eps_low, eps_high=self.eps_high)


class GSPOLoss(MeanRatioLoss):
    """GSPO (2507.18071): the length-normalised ratio exp(S / L).

    J_i = min(r A, clip(r) A), r = e^(S / L); mean over sequences.
    """

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gspo": {"eps_low": 0.01, "eps_high": 0.01},
        "gspo-entropy": {"eps_low": 0.01, "eps_high": 0.01, "entropy_coef": 0.5},
    }

    name: Literal["gspo"] = "gspo"

    def objective(self) -> SequenceLevel:
        """The gradient weights of the loss."""
        return SequenceLevel(band=self.band(), dual_clip=_dual_clip(self.dual_clip_ratio))

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        """The loss of one response with log-ratios and log-probs [L], L > 0."""
        return _definition(self, log_ratio.mean()[None], advantage)


class LUSPOLoss(MeanRatioLoss):
    """LUSPO (2602.05261): GSPO whose J_i counts L times, so that a response's gradient has no factor 1 / L.

    J_i = L min(r A, clip(r) A), r = e^(S / L); mean over sequences. The default limits are GSPO's.
    """

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {"luspo": {"eps_low": 0.01, "eps_high": 0.01}}

    name: Literal["luspo"] = "luspo"

    def objective(self) -> SequenceLevel:
        """The gradient weights of the loss."""
        dual_clip = _dual_clip(self.dual_clip_ratio)
        return SequenceLevel(band=self.band(), dual_clip=dual_clip, times_length=True)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        """The loss of one response with log-ratios and log-probs [L], L > 0."""
        plain = _definition(self, log_ratio.mean()[None], advantage)
        return replace(plain, objective=len(log_ratio) * plain.objective)


def _dual_clip(ratio: float | None) -> ConstantDualClip | None:
    return None if ratio is None else ConstantDualClip(ratio=ratio)


def _definition(loss: RLOOLoss | MeanRatioLoss, x: Tensor, advantage: float) -> Definition:
    ratio = x.exp()
    held = ratio.clamp(1 - loss.eps_low, 1 + loss.eps_high)
    limit = None if loss.dual_clip_ratio is None else x.new_tensor(loss.dual_clip_ratio)
    objective, clipped = pessimistic_minimum(x, advantage, ratio, held, limit)
    return Definition(objective=objective, clipped=clipped, out_of_band=bool(ratio != held))
