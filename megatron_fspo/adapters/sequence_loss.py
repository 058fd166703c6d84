"""FSPO as a loss of log-probs that the trainer around it backpropagates.

Shapes: n responses of this micro-batch, padded to T tokens; N of the whole optimizer step. Units: nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.objective import FSPOBand, LengthFairDualClip, Surrogate, sequence_surrogate
from megatron_fspo.objective.band import DEFAULT_C
from megatron_fspo.objective.calibration import sigma_hat


@dataclass(frozen=True, kw_only=True)
class FSPO:
    """The band of FSPO with its dual clip: −c_low·√L <= S <= c_high·√L, and S <= c_dual·√L for A < 0.

    Raises ``ValueError`` naming the field that is not legal.
    """

    c_low: float = DEFAULT_C
    """Nats per √token."""
    c_high: float = DEFAULT_C
    c_dual: float | None = None
    """The dual clip, at least c_high; default: 2 * c_high."""

    def __post_init__(self) -> None:
        self._limits()
        if self.c_dual is not None and self.c_dual < self.c_high:
            raise ValueError(
                f"c_dual must be at least c_high, got {self.c_dual:g} and {self.c_high:g}: "
                "the dual clip would lie inside the band"
            )

    def surrogate(self, log_ratio_sum: Tensor, lengths: Tensor, advantages: Tensor) -> Surrogate:
        """Weights and flags of responses with S, L and A, all [n]; see :func:`sequence_surrogate`."""
        band, dual_clip = self._limits()
        return sequence_surrogate(log_ratio_sum, lengths, advantages, band, dual_clip)

    def _limits(self) -> tuple[FSPOBand, LengthFairDualClip]:
        c_dual = 2 * self.c_high if self.c_dual is None else self.c_dual
        return FSPOBand(c_low=self.c_low, c_high=self.c_high), LengthFairDualClip(c=c_dual)


def limits_of(limits: Mapping[str, float], trainer: str, c_dual: float | None = None) -> FSPO:
    """The limits that stand under a trainer's keys for a ratio.

    Args:
        limits: key of the trainer → value, of c_low and then of c_high.
        trainer: its name.
        c_dual: default 2·c_high.

    Raises:
        ValueError: one is not legal, or was left at 0.2, a default meant for a ratio.
    """
    if 0.2 in limits.values():
        given = " and ".join(f"{key} = {value}" for key, value in limits.items())
        raise ValueError(
            f"{given} are c_low and c_high of FSPO, in nats per √token, and 0.2 is {trainer}'s default for a "
            f"ratio: set both of them, {DEFAULT_C} say"
        )
    low, high = limits.values()
    return FSPO(c_low=low, c_high=high, c_dual=c_dual)


def log_ratio_sums(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """S [n] of log-probs [n, T] with their graph, in float32 or above: the difference first, the sum later,
    over the response tokens of the policy (bool); outside of them old log-probs may be anything."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    difference = log_probs.to(dtype) - old_log_probs.detach().to(dtype)
    return torch.where(mask, difference, 0.0).sum(dim=-1)


def one_advantage(advantages: Tensor, mask: Tensor) -> Tensor:
    """A [n] of responses whose tokens all carry it [n, T]; 0 for an empty one.

    Raises ``ValueError`` where tokens of one response differ: FSPO has one decision, and so one A, for each.
    """
    return the_advantage(*advantage_range(advantages, mask), mask.any(dim=1))


def advantage_range(advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest A [n] of the tokens of each response [n, T]; inf and −inf where there are none."""
    lowest = torch.where(mask, advantages, torch.inf).amin(dim=1)
    return lowest, torch.where(mask, advantages, -torch.inf).amax(dim=1)


def the_advantage(lowest: Tensor, highest: Tensor, filled: Tensor) -> Tensor:
    """A [n] of responses whose tokens have A from lowest to highest; 0 for those that are not filled.

    Raises ``ValueError`` like :func:`one_advantage`.
    """
    # NaN on both sides is no difference: the surrogate reports it.
    if bool((lowest < highest).any()):
        raise ValueError(
            "FSPO takes one advantage for all tokens of a response, and here they differ: estimate it from "
            "the outcome (leave-one-out or a group's mean), not by GAE"
        )
    return torch.where(filled, highest, 0.0)


def mean_loss(log_ratio_sum: Tensor, surrogate: Surrogate, num_sequences: Tensor | float) -> Tensor:
    """−(1/N) Σ_i J_i over this micro-batch, with the gradient −(1/N) Σ_i weight_i·∇S_i.

    Args:
        log_ratio_sum: S [n] with its graph; what ``surrogate`` was made of.
        surrogate: of these responses.
        num_sequences: N, responses with tokens in the whole optimizer step, over all processes.
    """
    # Selected, not multiplied: an S that is not finite has the weight 0, and 0·inf is NaN.
    moved = torch.where(surrogate.weight != 0, log_ratio_sum - log_ratio_sum.detach(), 0.0)
    return -(surrogate.objective + surrogate.weight * moved).sum() / num_sequences


def flags(surrogate: Surrogate) -> dict[str, Tensor]:
    """Name of a share (docs/metrics.md) → the responses that it counts, bool [n]."""
    return {
        "fspo/clip_low": surrogate.clipped_low,
        "fspo/clip_high": surrogate.clipped_high,
        "fspo/dual_clip_frac": surrogate.dual_clipped,
        "fspo/out_of_band": surrogate.out_of_band,
        "fspo/nonfinite_share": surrogate.nonfinite,
    }


def metrics(log_ratio_sum: Tensor, lengths: Tensor, surrogate: Surrogate) -> dict[str, float]:
    """Shares of the responses with tokens, and ``fspo/sigma_hat``, of S [n] and L [n]; see docs/metrics.md.

    On policy, where S = 0, there is no ``fspo/sigma_hat``: a mean over micro-batches leaves them out.
    """
    filled = int((lengths > 0).sum())
    shares = {name: flag.sum().item() / max(filled, 1) for name, flag in flags(surrogate).items()}
    finite = log_ratio_sum.isfinite() & (lengths > 0)
    if bool((log_ratio_sum[finite] != 0).any()):
        shares["fspo/sigma_hat"] = sigma_hat(log_ratio_sum[finite], lengths[finite])
    return shares
