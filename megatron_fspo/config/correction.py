"""The ``correction`` section of the configuration: what to do where sampler and trainer differ.

delta_t is log pi_trainer - log pi_sampler of a token, before the first update; sums are over a response.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megatron_fspo.section import Section


class NoCorrection(Section):
    """Only measure the difference."""

    name: Literal["none"] = "none"


class TokenTIS(Section):
    """Truncated importance sampling by token: weight `min(exp(delta_t), cap)`."""

    name: Literal["token_tis"] = "token_tis"
    cap: Annotated[float, Field(ge=1)] = Field(2.0, description="largest weight of a token")


class IcePop(Section):
    """IcePop (2510.18855): token weight `exp(delta_t)`, 0 outside [low, high]."""

    name: Literal["icepop"] = "icepop"
    low: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="smallest weight kept")
    high: Annotated[float, Field(ge=1)] = Field(5.0, description="largest weight kept")


class SequenceTIS(Section):
    """Truncated importance sampling by sequence: weight `min(exp(sum of delta_t), cap)`."""

    name: Literal["sequence_tis"] = "sequence_tis"
    cap: Annotated[float, Field(ge=1)] = Field(2.0, description="largest weight of a sequence")


class SequenceMask(Section):
    """Drop sequences with `exp(sum of delta_t)` outside [low, high], which drops more long ones."""

    name: Literal["sequence_mask"] = "sequence_mask"
    low: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="smallest weight kept")
    high: Annotated[float, Field(ge=1)] = Field(2.0, description="largest weight kept")


class LengthFairGate(Section):
    """Drop sequences with `abs(sum of delta_t) > c * sqrt(L)`, the same share at every length (ours)."""

    name: Literal["length_fair_gate"] = "length_fair_gate"
    c: PositiveFloat = Field(
        0.05, description="nats per sqrt(token); three to four times `rollout/mismatch_sigma` of a sound run"
    )


CorrectionConfig = Annotated[
    NoCorrection | TokenTIS | IcePop | SequenceTIS | SequenceMask | LengthFairGate,
    Field(discriminator="name"),
]
