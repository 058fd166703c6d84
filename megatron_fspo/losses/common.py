"""The base of all policy losses: common keys, answers to trainer, ``verify`` and lab, and state in a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from megatron_fspo.losses.section import Section, Share
from megatron_fspo.objective import ClipBand, PolicyObjective
from megatron_fspo.objective.noise import Noise
from megatron_fspo.objective.policy_objective import LossInputs, LossTerms


class Loss(Section):
    """The base of all policy losses. One needs its weights (``__call__``, or an ``objective`` of a form that
    others have too) and its ``definition``; to be compared, also ``band``, ``prefix_band`` or
    ``token_reach``, ``LIMITS`` and ``scaled``. The rest is for limits that move during a run."""

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name → keys of what ``verify`` checks: limits that some of its small batch lies outside of."""
    DECIDES_BY_RATIOS: ClassVar[bool] = True
    """Clips follow from log-ratios alone. ``verify`` gives those exactly, in every precision; where π
    itself decides, bf16 may round it to the other side of a limit, and the loss is left out there."""
    COLLECTIVES: ClassVar[int] = 2
    """Over context-parallel ranks in a micro-batch, at most."""
    CLIPS: ClassVar[bool] = True
    """False for a loss without limits."""
    COMPARED: ClassVar[bool] = True
    """False for a loss with limits that ``explain`` leaves out, as its decisions are those of another."""
    LIMITS: ClassVar[tuple[str, ...]] = ()
    """The keys that ``scaled`` changes, lower limit first."""
    RUN_KEYS: ClassVar[frozenset[str]] = frozenset()
    """Keys of a loss with limits that say nothing of what is clipped in a given batch."""

    advantage: Literal["leave_one_out", "group_normalized"] = Field(
        "leave_one_out", description="leave_one_out: RLOO; group_normalized: GRPO's (reward - mean) / std"
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="bonus on the mean token entropy")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="penalty on the KL to `model.checkpoint`, per response token; above 0 keeps that "
        "model in memory",
    )
    max_nonfinite_share: Share = Field(
        0.05, description="stop when a larger share of an optimizer step's sequences is not finite"
    )

    def objective(self) -> PolicyObjective:
        """The gradient weights of the loss: its own, or those of a form that several losses have."""
        return self

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """The weights, as ``PolicyObjective`` has them."""
        raise NotImplementedError

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        """The loss of one response with log-ratios and log-probs [L], L > 0."""
        raise NotImplementedError

    def start(self, noise: Noise | None = None, *, longest: int, updates: int = 1) -> LossState:
        """The loss at the start of a run: ``noise`` in S, where it was measured; the longest response, in
        tokens; and off-policy optimizer steps of one rollout."""
        return LossState(self)

    def by_turn(self) -> bool:
        """True if each turn of a trajectory has a ``definition`` of its own; J_i is their sum."""
        return getattr(self.objective(), "unit", "trajectory") == "turn"

    def band(self) -> ClipBand | None:
        """The limits on S; None for a loss that decides token by token, or weighs without a limit."""
        return None

    def prefix_band(self) -> ClipBand | None:
        """The limits on the sum S_t of the log-ratios up to token t, for a loss that decides by those."""
        return None

    def token_reach(self, inputs: LossInputs) -> Tensor:
        """[t] the factor by which ``LIMITS`` have to be scaled for a token to lie on their edge; of a loss
        with ``LIMITS`` and no band."""
        raise NotImplementedError

    def limits(self) -> dict[str, float]:
        """The values of ``LIMITS``."""
        return {key: getattr(self, key) for key in self.LIMITS}

    def scaled(self, factor: float) -> Self:
        """The loss with a fixed band so many times as wide, in nats; its two limits keep their ratio."""
        raise NotImplementedError

    def fitted(self, log_ratio_sums: Tensor, lengths: Tensor) -> Self:
        """The loss with what is left to be measured of the form of its limits, from S [N] and L [N]."""
        return self

    def widest(self) -> float:
        """The largest factor for ``scaled``."""
        return math.inf

    def check(self, *, off_policy_updates: int, sampled: bool) -> None:
        """Raise ``ValueError`` where the loss does not go with the rest of the configuration: optimizer steps
        per rollout that a band is measured from, and whether S starts from the sampler's log-probs."""

    def notes(self, *, steps: int, updates: int, off_policy_updates: int, warmup_updates: int) -> list[str]:
        """Return notes for the user, before a run.

        Args:
            steps: of the run, each with one rollout.
            updates: optimizer steps of each.
            off_policy_updates: those of them that a band is measured from.
            warmup_updates: optimizer steps of the learning rate's warm-up.
        """
        return []

    def noise_file(self) -> Path | None:
        """The file of ``calibrate`` that a run reads before it starts."""
        return None

    def check_noise(self, noise: Noise, lengths: Sequence[int], origin: str) -> None:
        """Raise ``InputError`` where the band lies inside the noise in S, as measured, at one of these
        response lengths, in tokens; ``origin`` is that of the noise, in words."""

    def unmeasured(self) -> Self:
        """The loss for a run that is to measure the noise."""
        return self

    def reported(self, last: Callable[[str], float]) -> Self | None:
        """The loss with its band where a run has moved it; None where the run says nothing of it. ``last``
        gives the run's last value of one of ``LossState.metrics``, NaN without any."""
        return self


class LossState:
    """A loss during a run, its moving parts and all. This one has none; see ``Loss.start``."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def objective(self, *, on_policy: bool = False) -> PolicyObjective:
        """The gradient weights for the next optimizer step. ``on_policy``: no other update of this rollout
        has moved the policy before; S is 0 and has no drift."""
        return self._loss.objective()

    def observe(
        self, log_ratio_sums: Tensor, lengths: Tensor, *, kl_k3: float, sigma: float | None, warm: bool
    ) -> None:
        """Learn from one off-policy mini-batch, over all ranks.

        Args:
            log_ratio_sums: S [N].
            lengths: L [N].
            kl_k3: KL per token by the k3 estimator.
            sigma: σ̂ of these sequences, if there were any.
            warm: whether this rollout began after the learning rate's warm-up. Smaller steps make smaller
                S: a width measured during the warm-up would be too narrow for the rest of the run.
        """

    def calibrated(self) -> str | None:
        """The measured band in words; None until it was measured."""
        return None

    def metrics(self) -> dict[str, float]:
        """The band of off-policy updates as it stands."""
        return {}

    def noise_metrics(self, lengths: Tensor, out_of_band: float) -> dict[str, float]:
        """Return the share of a step's off-policy sequences, of lengths L [N], that noise alone is expected
        to put outside, given the share of them that is."""
        return {}

    def doubts(self, metrics: Mapping[str, float], *, warm: bool) -> dict[str, str]:
        """Topic → problem with the width of the band, after one more step with these metrics, the loss's own
        among them. ``warm`` as :meth:`observe` has it; the small S of a warm-up say nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; keys of the configuration win over it."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A loss as one writes it down, for one response of L tokens; autograd runs through it.

    It is what ``verify`` checks the gradient weights against, so it shares no code with them.
    """

    objective: Tensor
    """J [1] of the sequence, or [L] of its tokens, with its graph."""
    mean: Literal["sequence", "token"] = "sequence"
    """J is averaged over sequences, of which each is the mean of its values, or over all tokens alike."""
    clipped: float
    """1 or 0: the clip acts on the sequence, which has an advantage; token level: the share of its tokens."""
    out_of_band: bool
    """S, or any token's log-ratio, lies outside the limits, whatever the sign of the advantage."""


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
