"""From the configuration's ``loss`` section to a policy objective, and what moves during a run.

Only FSPO has moving parts: its width c (once, by calibration) and, where asked for, its drift.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from megatron_fspo.config.losses import DAPOLoss, FSPOLoss, GRPOLoss, GSPOLoss, PolicyLossConfig, RLOOLoss
from megatron_fspo.errors import InputError
from megatron_fspo.objective import (
    BandCalibrator,
    ClipBand,
    ConstantDualClip,
    DualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
    drift_from_kl,
    drift_from_sigma,
)
from megatron_fspo.objective.losses import PolicyObjective, SequenceLevel, TokenLevel
from megatron_fspo.objective.noise import Noise


class LossState:
    """The loss of the run, as it stands now.

    Args:
        noise: in S, where it was measured.
    """

    def __init__(self, loss: PolicyLossConfig, noise: Noise | None = None) -> None:
        self._loss = loss
        self._calibrator: BandCalibrator | None = None
        self._drift = 0.0
        if isinstance(loss, FSPOLoss):
            if loss.drift == "given":
                self._drift = loss.drift_value
            elif loss.drift == "measured" and noise is not None:
                self._drift = noise.drift
            if loss.calibrate:
                self._calibrator = BandCalibrator(mini_batches=loss.calibrate, exponent=loss.exponent)

    def objective(self) -> PolicyObjective:
        """For the next optimizer step."""
        loss = self._loss
        if isinstance(loss, GRPOLoss | DAPOLoss):
            return TokenLevel(
                eps_low=loss.eps_low,
                eps_high=loss.eps_high,
                dual_clip_ratio=loss.dual_clip_ratio,
                aggregation="sequence-mean" if isinstance(loss, GRPOLoss) else "token-mean",
            )
        if isinstance(loss, FSPOLoss):
            return SequenceLevel(band=self._fspo_band(loss), dual_clip=self._fspo_dual_clip(loss))
        band: ClipBand
        if isinstance(loss, RLOOLoss):
            band = RLOOBand(eps_low=loss.eps_low, eps_high=loss.eps_high)
        else:
            assert isinstance(loss, GSPOLoss)
            band = GSPOBand(eps_low=loss.eps_low, eps_high=loss.eps_high)
        dual = ConstantDualClip(ratio=loss.dual_clip_ratio) if loss.dual_clip_ratio else None
        return SequenceLevel(band=band, dual_clip=dual)

    def observe(
        self, log_ratio_sums: Tensor, lengths: Tensor, *, kl_k3: float, sigma: float | None, warm: bool
    ) -> None:
        """Learn from one off-policy mini-batch, over all ranks.

        Args:
            log_ratio_sums, lengths: [N] S and L.
            kl_k3: KL per token by the k3 estimator.
            sigma: σ̂ of these sequences, if there were any.
            warm: whether this rollout began after the learning rate's warm-up. Smaller steps make smaller
                S: a width measured during the warm-up would be too narrow for the rest of the run.
        """
        loss = self._loss
        if not isinstance(loss, FSPOLoss):
            return
        # σ̂ = 0: no update has moved the policy yet (every advantage was 0, say).
        if warm and sigma and self._calibrator is not None and self._calibrator.c is None:
            self._calibrator.observe(log_ratio_sums, lengths)
        if loss.drift == "k3" and math.isfinite(kl_k3):
            self._drift = drift_from_kl(max(kl_k3, 0.0), loss.drift_cap)
        elif loss.drift == "half_variance" and sigma is not None:
            self._drift = drift_from_sigma(sigma, loss.drift_cap)

    def metrics(self) -> dict[str, float]:
        """The band as it stands, for FSPO."""
        if not isinstance(self._loss, FSPOLoss):
            return {}
        band = self._fspo_band(self._loss)
        return {"fspo/c_low": band.c_low, "fspo/c_high": band.c_high, "fspo/drift": band.drift}

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        calibrator = None if self._calibrator is None else self._calibrator.state_dict()
        return {"drift": self._drift, "calibrator": calibrator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the band of a checkpoint; keys of the configuration win over it."""
        if isinstance(self._loss, FSPOLoss) and self._loss.drift in ("k3", "half_variance"):
            self._drift = state["drift"]
        if self._calibrator is not None and state["calibrator"] is not None:
            try:
                self._calibrator.load_state_dict(state["calibrator"])
            except ValueError as error:
                raise InputError(f"loss.calibrate or loss.exponent is not what it was: {error}") from None

    def _fspo_band(self, loss: FSPOLoss) -> FSPOBand:
        calibrated = None if self._calibrator is None else self._calibrator.c
        return FSPOBand(
            c_low=calibrated or loss.c_low,
            c_high=calibrated or loss.c_high,
            drift=self._drift,
            exponent=loss.exponent,
        )

    def _fspo_dual_clip(self, loss: FSPOLoss) -> DualClip | None:
        band = self._fspo_band(loss)
        if loss.dual_clip == "length_fair":
            c = loss.c_dual or 2 * band.c_high
            return LengthFairDualClip(c=c, exponent=band.exponent, drift=band.drift)
        return ConstantDualClip(ratio=loss.dual_clip_ratio) if loss.dual_clip == "constant" else None
