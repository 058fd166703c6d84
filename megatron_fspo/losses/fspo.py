"""FSPO: the importance ratio of the whole response, clipped to a band that grows as √L."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, model_validator
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss, pessimistic_minimum
from megatron_fspo.objective import ConstantDualClip, DualClip, FSPOBand, LengthFairDualClip, SequenceLevel
from megatron_fspo.section import Share

# A single token's ratio of e^3 = 20.
Width = Annotated[float, Field(gt=0, le=3)]


class FSPOLoss(Loss):
    """FSPO (2509.09177): clip the summed log-ratio S to a band that grows as L^exponent.

    J_i = min(e^S A, e^clip(S) A), with clip to [-c_low L^a + d L, c_high L^a + d L]; mean over sequences.
    """

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fspo": {"c_low": 0.05, "c_high": 0.05},
        "fspo-drift": {
            **{"c_low": 0.04, "c_high": 0.06, "drift": "given", "drift_value": -0.002, "dual_clip": "off"}
        },
        "fspo-dual": {"c_low": 0.05, "c_high": 0.02, "c_dual": 0.02},
        "fspo-temper": {"c_low": 0.05, "c_high": 0.04, "c_dual": 0.05, "temper": 0.4},
        "fspo-entropy-kl": {
            **{"c_low": 0.05, "c_high": 0.05, "dual_clip": "constant", "dual_clip_ratio": 1.2},
            **{"entropy_coef": 0.3, "kl_coef": 0.2},
        },
    }

    name: Literal["fspo"] = "fspo"
    c_low: Width = Field(0.03, description="lower edge: -c_low * L^exponent + drift * L, in nats")
    c_high: Width = Field(0.03, description="upper edge: c_high * L^exponent + drift * L, in nats")
    exponent: Annotated[float, Field(ge=0, le=1)] | Literal["measured"] = Field(
        0.5,
        description="0.5 in the paper; measured: by `calibrate`, together with the width, within 0.5 and 1",
    )
    temper: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="b of the importance weight exp(S / L^b): 0 is FSPO's, 1 that of the mean log-ratio; the "
        "clip decisions stay the same",
    )
    calibrate: NonNegativeInt = Field(
        0,
        description="scale the band to 2 sigma of S / L^exponent, past the warm-up, until two windows of so "
        "many off-policy mini-batches agree; the ratio of c_low, c_high and c_dual stays",
    )
    drift: Literal["none", "given", "measured", "k3", "half_variance"] = Field(
        "none",
        description="centre of the band per token: none, `drift_value`, that of `noise` (for "
        "rollout.old_log_probs = sampled), -KL (k3), or -sigma^2/2; the last two from a rollout's first "
        "off-policy update on",
    )
    drift_value: float = Field(0.0, description="nats per token, for drift = given")
    drift_cap: Annotated[float, Field(gt=0)] = Field(
        0.01,
        description="largest |drift| per token of an estimate, which also never moves the band by more than "
        "its half width",
    )
    dual_clip: Literal["off", "length_fair", "constant"] = Field(
        "length_fair",
        description="limit of S for A < 0: c_dual * L^exponent, or log(dual_clip_ratio)",
    )
    noise: Path | None = Field(
        None, description="file of `megatron-fspo calibrate`: what of S is noise on this machine"
    )
    max_noise_clip_rate: Share = Field(
        0.05,
        description="no run where `noise` alone puts a larger share of responses outside, at any length",
    )
    c_dual: Annotated[float, Field(gt=0)] | None = Field(
        None, description="at least c_high; default: 2 * c_high"
    )
    dual_clip_ratio: Annotated[float, Field(gt=1)] = Field(3.0, description="for dual_clip = constant")

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> FSPOLoss:
        if self.c_dual is not None and self.c_dual < self.c_high:
            raise ValueError(
                f"loss.c_dual = {self.c_dual:g} is less than loss.c_high = {self.c_high:g}: the dual clip "
                "would lie inside the band"
            )
        return self

    @model_validator(mode="after")
    def _measured_by_calibration(self) -> FSPOLoss:
        if self.exponent == "measured" and self.calibrate < 3:
            raise ValueError(
                f"loss.exponent = measured needs loss.calibrate of 3 or more, not {self.calibrate}: it is "
                "measured from so many off-policy mini-batches, with an interval"
            )
        return self

    @property
    def _power(self) -> float:
        return 0.5 if self.exponent == "measured" else self.exponent

    def moved(
        self, *, c_low: float, c_high: float, drift: float | None = None, exponent: float | None = None
    ) -> FSPOLoss:
        """The loss with its band where a run has moved it; ``c_dual`` moves as ``c_high`` does."""
        c_dual = None if self.c_dual is None else self.c_dual * c_high / self.c_high
        changes: dict[str, Any] = {"c_low": c_low, "c_high": c_high, "c_dual": c_dual}
        if exponent is not None:
            changes["exponent"] = exponent
        if drift is not None:
            changes |= {"drift": "given", "drift_value": drift}
        return self.model_copy(update=changes)

    def centred(self, drift: float) -> FSPOLoss:
        """The loss with its band centred on ``drift`` nats per token."""
        return self.moved(c_low=self.c_low, c_high=self.c_high, drift=drift)

    def band(self) -> FSPOBand:
        """The band as it stands: without the drift of an estimate, and with the exponent ½ where that is
        still to be measured (see :meth:`moved`)."""
        drift = self.drift_value if self.drift == "given" else 0.0
        return FSPOBand(c_low=self.c_low, c_high=self.c_high, drift=drift, exponent=self._power)

    def objective(self) -> SequenceLevel:
        """The gradient weights of the loss."""
        return SequenceLevel(band=self.band(), dual_clip=self._dual_clip(), temper=self.temper)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        """The loss of one response with log-ratios and log-probs [L], L > 0."""
        length = len(log_ratio)
        s = log_ratio.sum()[None]
        width = length**self._power
        centre = self.drift_value * length if self.drift == "given" else 0.0
        inside = s.clamp(centre - self.c_low * width, centre + self.c_high * width)
        limit = None
        if self.dual_clip == "length_fair":
            c = 2 * self.c_high if self.c_dual is None else self.c_dual
            limit = _growth(s.new_tensor([c * width + centre]), length, self.temper)
        elif self.dual_clip == "constant":
            limit = _growth(s.new_tensor([self.dual_clip_ratio]).log(), length, self.temper)
        growth, held = (_growth(value, length, self.temper) for value in (s, inside))
        objective, clipped = pessimistic_minimum(s, advantage, growth, held, limit)
        return Definition(objective=objective, clipped=clipped, out_of_band=bool(s != inside))

    def _dual_clip(self) -> DualClip | None:
        band = self.band()
        if self.dual_clip == "length_fair":
            c = self.c_dual or 2 * self.c_high
            return LengthFairDualClip(c=c, exponent=band.exponent, drift=band.drift)
        return ConstantDualClip(ratio=self.dual_clip_ratio) if self.dual_clip == "constant" else None


def _growth(s: Tensor, length: int, temper: float) -> Tensor:
    """The integral of exp(S / L^b) over S that is 1 at S = 0: exp(S) for b = 0."""
    scale = length**temper
    return 1 + scale * torch.special.expm1(s / scale)
