"""What every policy loss has: common keys, and the form in which it states its own definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_fspo.section import Section, Share


class Loss(Section):
    """What every policy loss has."""

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name → keys of what ``verify`` checks: limits that some of its small batch lies outside of."""
    DECIDES_BY_RATIOS: ClassVar[bool] = True
    """Whether clips follow from log-ratios alone. ``verify`` gives those exactly, in every precision; where π
    itself decides, bf16 may round it to the other side of a limit, and the loss is left out there."""

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


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A loss as one writes it down, for one response of L tokens; autograd runs through it.

    It is what ``verify`` checks the gradient weights against, so it shares no code with them.
    """

    objective: Tensor
    """J [1] of the sequence, or [L] of its tokens, with its graph."""
    mean: Literal["sequence", "token"] = "sequence"
    """What J is averaged over: sequences, of which each is the mean of its values; or all tokens alike."""
    clipped: float
    """1 or 0: the clip acts on the sequence, which has an advantage; token level: the share of its tokens."""
    out_of_band: bool
    """Whether S, or any token's log-ratio, lies outside the limits, whatever the sign of the advantage."""


def pessimistic_minimum(
    log_ratio: Tensor, advantage: float, growth: Tensor, held: Tensor, limit: Tensor | None
) -> tuple[Tensor, float]:
    """PPO's clipped objective and the share of values whose gradient it removes::

        J = min(growth·A, held·A)
        J = max(J, limit·A)                  for A < 0, where there is a dual clip

    Args:
        log_ratio: [k] with its graph; what ``growth`` and ``held`` are made of.
        advantage: A.
        growth: [k], such as the importance ratio.
        held: [k], the same of the clipped log-ratio.
        limit: the largest ``growth`` that counts for A < 0; None without a dual clip.
    """
    objective = torch.minimum(growth * advantage, held * advantage)
    if advantage < 0 and limit is not None:
        objective = objective.maximum(limit * advantage)
    (slope,) = torch.autograd.grad(objective.sum(), log_ratio, retain_graph=True)
    return objective, (slope == 0).double().mean().item() if advantage else 0.0
