"""FSPO as a loss on log-probs, for a trainer that backpropagates it.

Shapes: n responses of this micro-batch, padded to T tokens; N of the whole optimizer step. Units: nats.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.objective import FSPOBand, LengthFairDualClip, Surrogate, sequence_surrogate
from megatron_fspo.objective.band import DEFAULT_C, WIDE_C
from megatron_fspo.objective.calibration import expected_drift, sigma_hat


@dataclass(frozen=True, kw_only=True)
class FSPO:
    """FSPO's band and dual clip: −c_low·√L <= S <= c_high·√L, and S <= c_dual·√L for A < 0. Invalid limits
    raise ``ValueError``; probable mistakes warn."""

    c_low: float = DEFAULT_C
    """Nats per √token."""
    c_high: float = DEFAULT_C
    c_dual: float | None = None
    """The dual clip, at least c_high; default: 2 * c_high."""
    centred: bool = False
    """For responses of thousands of tokens: move all limits by −c²L/8, the mean of S where c = 2σ̂; c is the
    mean of c_low and c_high."""

    def __post_init__(self) -> None:
        self._limits()
        if self.c_dual is not None and self.c_dual < self.c_high:
            raise ValueError(
                f"c_dual must be at least c_high, got {self.c_dual:g} and {self.c_high:g}: "
                "the dual clip would lie inside the band"
            )
        if max(self.c_low, self.c_high) >= WIDE_C:
            warnings.warn(
                f"c_low = {self.c_low:g} and c_high = {self.c_high:g} limit S in nats per √token, not a "
                "ratio: 0.2 allows a ratio of e^6.3 at 1000 tokens",
                stacklevel=3,
            )

    def surrogate(self, log_ratio_sum: Tensor, lengths: Tensor, advantages: Tensor) -> Surrogate:
        """Return weights and clip flags for S, L and A [n]; see :func:`sequence_surrogate`."""
        band, dual_clip = self._limits()
        return sequence_surrogate(log_ratio_sum, lengths, advantages, band, dual_clip)

    def _limits(self) -> tuple[FSPOBand, LengthFairDualClip]:
        c_dual = 2 * self.c_high if self.c_dual is None else self.c_dual
        drift = expected_drift((self.c_low + self.c_high) / 4) if self.centred else 0.0
        band = FSPOBand(c_low=self.c_low, c_high=self.c_high, drift=drift)
        return band, LengthFairDualClip(c=c_dual, drift=drift)


def make_fspo(
    limits: Mapping[str, float], trainer: str, c_dual: float | None = None, *, centred: bool = False
) -> FSPO:
    """Return FSPO's limits from the keys that a trainer has for limits on a ratio.

    Args:
        limits: the trainer's key → value, for c_low, then for c_high.
        trainer: its name.
        c_dual: default: 2·c_high.
        centred: see :class:`FSPO`.

    Raises:
        ValueError: a value is invalid, or still 0.2, a default that is meant for a ratio.
    """
    if 0.2 in limits.values():
        given = " and ".join(f"{key} = {value}" for key, value in limits.items())
        raise ValueError(
            f"{given} are FSPO's c_low and c_high, in nats per √token, but 0.2 is {trainer}'s default for a "
            f"ratio: set both of them, for example to {DEFAULT_C}"
        )
    low, high = limits.values()
    return FSPO(c_low=low, c_high=high, c_dual=c_dual, centred=centred)


def log_ratio_sums(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return S [n] from log-probs [n, T] with their graph, in float32 or float64: differences, summed over
    the policy's response tokens (bool ``mask``). Old log-probs outside the mask are ignored."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    difference = log_probs.to(dtype) - old_log_probs.detach().to(dtype)
    return torch.where(mask, difference, 0.0).sum(dim=-1)


def one_advantage(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return A [n] from advantages [n, T] that are equal on all tokens of a response; 0 for an empty one.
    Otherwise raise ``ValueError``: FSPO makes one decision per response, with one A."""
    return the_advantage(*advantage_range(advantages, mask), mask.any(dim=1))


def advantage_range(advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest A [n] of each response's tokens [n, T]; inf and −inf if it has none."""
    lowest = torch.where(mask, advantages, torch.inf).amin(dim=1)
    return lowest, torch.where(mask, advantages, -torch.inf).amax(dim=1)


def the_advantage(lowest: Tensor, highest: Tensor, filled: Tensor) -> Tensor:
    """Return A [n], given the range of A over each response's tokens; 0 where ``filled`` is False. Raises
    ``ValueError`` like :func:`one_advantage`."""
    # NaN compares as no difference here; the surrogate reports it.
    if bool((lowest < highest).any()):
        raise ValueError(
            "FSPO needs one advantage for all tokens of a response, but these differ: estimate it from the "
            "outcome (leave-one-out or group mean), not with GAE"
        )
    return torch.where(filled, highest, 0.0)


def mean_loss(log_ratio_sum: Tensor, surrogate: Surrogate, num_sequences: Tensor | float) -> Tensor:
    """Return −(1/N) Σ_i J_i over this micro-batch, with the gradient −(1/N) Σ_i weight_i·∇S_i.

    Args:
        log_ratio_sum: S [n] with its graph, from which ``surrogate`` was computed.
        surrogate: of these responses.
        num_sequences: N, responses with tokens in the whole optimizer step, over all processes.
    """
    # Select, do not multiply: a non-finite S has weight 0, and 0·inf is NaN.
    moved = torch.where(surrogate.weight != 0, log_ratio_sum - log_ratio_sum.detach(), 0.0)
    return -(surrogate.objective + surrogate.weight * moved).sum() / num_sequences


def flags(surrogate: Surrogate) -> dict[str, Tensor]:
    """Return name of the rate (docs/metrics.md) → the responses that it counts, bool [n]."""
    return {
        "fspo/clip_low": surrogate.clipped_low,
        "fspo/clip_high": surrogate.clipped_high,
        "fspo/dual_clip_frac": surrogate.dual_clipped,
        "fspo/out_of_band": surrogate.out_of_band,
        "fspo/nonfinite_share": surrogate.nonfinite,
    }


def metrics(log_ratio_sum: Tensor, lengths: Tensor, surrogate: Surrogate) -> dict[str, float]:
    """Return rates over the responses with tokens, and ``fspo/sigma_hat``; see docs/metrics.md. Without any
    S ≠ 0 (on-policy), ``fspo/sigma_hat`` is missing, so that means over micro-batches ignore it."""
    filled = int((lengths > 0).sum())
    shares = {name: flag.sum().item() / max(filled, 1) for name, flag in flags(surrogate).items()}
    finite = log_ratio_sum.isfinite() & (lengths > 0)
    if bool((log_ratio_sum[finite] != 0).any()):
        shares["fspo/sigma_hat"] = sigma_hat(log_ratio_sum[finite], lengths[finite])
    return shares
