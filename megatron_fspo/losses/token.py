"""GRPO and DAPO: one importance ratio and one clip decision per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor

from megatron_fspo.losses.common import Definition, Loss, pessimistic_minimum
from megatron_fspo.objective import TokenLevel
from megatron_fspo.section import UnitInterval


class TokenLoss(Loss):
    """Token-level clipping."""

    eps_low: UnitInterval = Field(0.2, description="token ratio >= 1 - eps_low")
    dual_clip_ratio: Annotated[float, Field(gt=1)] | None = Field(None, description="limit for A < 0")


class GRPOLoss(TokenLoss):
    """GRPO (2402.03300): token ratios, mean over each sequence, mean over sequences.

    J_it = min(r A, clip(r) A), r = the token's ratio.
    """

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "grpo": {"eps_low": 0.05, "eps_high": 0.05, "dual_clip_ratio": 1.08},
        "grpo-kl": {"eps_low": 0.05, "eps_high": 0.05, "kl_coef": 0.3},
    }

    name: Literal["grpo"] = "grpo"
    eps_high: PositiveFloat = Field(0.2, description="token ratio <= 1 + eps_high")

    def objective(self) -> TokenLevel:
        """The gradient weights of the loss."""
        return _objective(self, "sequence-mean")

    def definition(self, log_ratio: Tensor, advantage: float) -> Definition:
        """The loss of one response with log-ratios [L], L > 0."""
        return _definition(self, log_ratio, advantage, "sequence")


class DAPOLoss(TokenLoss):
    """DAPO (2503.14476): token ratios, clip higher, mean over tokens.

    J_it = min(r A, clip(r) A), r = the token's ratio.
    """

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dapo": {"eps_low": 0.05, "eps_high": 0.06}}

    name: Literal["dapo"] = "dapo"
    eps_high: PositiveFloat = Field(0.28, description="token ratio <= 1 + eps_high")

    def objective(self) -> TokenLevel:
        """The gradient weights of the loss."""
        return _objective(self, "token-mean")

    def definition(self, log_ratio: Tensor, advantage: float) -> Definition:
        """The loss of one response with log-ratios [L], L > 0."""
        return _definition(self, log_ratio, advantage, "token")


def _objective(loss: GRPOLoss | DAPOLoss, aggregation: Literal["sequence-mean", "token-mean"]) -> TokenLevel:
    return TokenLevel(
        eps_low=loss.eps_low,
        eps_high=loss.eps_high,
        dual_clip_ratio=loss.dual_clip_ratio,
        aggregation=aggregation,
    )


def _definition(
    loss: GRPOLoss | DAPOLoss, log_ratio: Tensor, advantage: float, mean: Literal["sequence", "token"]
) -> Definition:
    ratio = log_ratio.exp()
    held = ratio.clamp(1 - loss.eps_low, 1 + loss.eps_high)
    limit = None if loss.dual_clip_ratio is None else ratio.new_tensor(loss.dual_clip_ratio)
    objective, clipped = pessimistic_minimum(log_ratio, advantage, ratio, held, limit)
    return Definition(
        objective=objective, mean=mean, clipped=clipped, out_of_band=bool((ratio != held).any())
    )
