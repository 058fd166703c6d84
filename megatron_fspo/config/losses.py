"""The ``loss`` section of the configuration: what is clipped where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from megatron_fspo.config.section import Section, Share, UnitInterval


class Loss(Section):
    """What every policy loss has."""

    advantage: Literal["leave_one_out", "group_normalized"] = Field(
        "leave_one_out", description="leave_one_out: RLOO; group_normalized: GRPO's (r - mean) / std"
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="bonus on the mean token entropy")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="penalty on the KL to `model.checkpoint`, per response token; above 0 that model is "
        "kept in memory",
    )
    max_nonfinite_share: Share = Field(
        0.05, description="stop when more than this share of an optimizer step's sequences is not finite"
    )


class FSPOLoss(Loss):
    """FSPO: clip the summed log-ratio S to a band that grows as L^exponent."""

    name: Literal["fspo"] = "fspo"
    c_low: PositiveFloat = Field(0.03, description="lower edge: -c_low * L^exponent + drift * L, in nats")
    c_high: PositiveFloat = Field(0.03, description="upper edge: c_high * L^exponent + drift * L, in nats")
    exponent: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="0.5 in the paper")
    calibrate: NonNegativeInt = Field(
        0,
        description="set c to 2 sigma of S / L^exponent after so many off-policy mini-batches past "
        "the warm-up",
    )
    drift: Literal["none", "given", "measured", "k3", "half_variance"] = Field(
        "none",
        description="centre of the band per token: none, `drift_value`, that of `noise` (for "
        "rollout.old_log_probs = sampled), -KL (k3), or -sigma^2/2",
    )
    drift_value: float = Field(0.0, description="nats per token, for drift = given")
    drift_cap: PositiveFloat = Field(0.01, description="largest |drift| per token of an estimate")
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
    c_dual: PositiveFloat | None = Field(None, description="default: 2 * c_high")
    dual_clip_ratio: Annotated[float, Field(gt=1)] = Field(3.0, description="for dual_clip = constant")


class RLOOLoss(Loss):
    """RLOO with a constant band on exp(S)."""

    name: Literal["rloo"] = "rloo"
    eps_low: UnitInterval = Field(0.2, description="exp(S) >= 1 - eps_low")
    eps_high: PositiveFloat = Field(0.2, description="exp(S) <= 1 + eps_high")
    dual_clip_ratio: Annotated[float, Field(gt=1)] | None = Field(None, description="limit for A < 0")


class GSPOLoss(Loss):
    """GSPO: the length-normalised ratio exp(S / L)."""

    name: Literal["gspo"] = "gspo"
    eps_low: UnitInterval = Field(3e-4, description="exp(S / L) >= 1 - eps_low")
    eps_high: PositiveFloat = Field(4e-4, description="exp(S / L) <= 1 + eps_high")
    dual_clip_ratio: Annotated[float, Field(gt=1)] | None = Field(None, description="limit for A < 0")


class TokenLoss(Loss):
    """Token-level clipping."""

    eps_low: UnitInterval = Field(0.2, description="token ratio >= 1 - eps_low")
    dual_clip_ratio: Annotated[float, Field(gt=1)] | None = Field(None, description="limit for A < 0")


class GRPOLoss(TokenLoss):
    """GRPO: token ratios, mean over each sequence, mean over sequences."""

    name: Literal["grpo"] = "grpo"
    eps_high: PositiveFloat = Field(0.2, description="token ratio <= 1 + eps_high")


class DAPOLoss(TokenLoss):
    """DAPO: token ratios, clip higher, mean over tokens."""

    name: Literal["dapo"] = "dapo"
    eps_high: PositiveFloat = Field(0.28, description="token ratio <= 1 + eps_high")


PolicyLossConfig = Annotated[
    FSPOLoss | RLOOLoss | GSPOLoss | GRPOLoss | DAPOLoss, Field(discriminator="name")
]
