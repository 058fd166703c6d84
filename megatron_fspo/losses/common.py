"""Base classes of the policy losses: keys, the interface to trainer, ``verify`` and lab, and run state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from megatron_fspo.objective import ClipBand, PolicyObjective
from megatron_fspo.objective.noise import Noise
from megatron_fspo.objective.surrogate import LossInputs, LossTerms
from megatron_fspo.section import Section, Share


class Loss(Section):
    """Base class of the policy losses; its fields are keys of the ``loss`` section. A loss needs gradient
    weights (``__call__``, or an ``objective`` shared with other losses) and a ``definition``. For ``explain``
    it also needs ``LIMITS``, ``scaled``, and ``band``, ``prefix_band`` or ``token_reach``. The other methods
    are for limits that move during a run."""

    VERIFIED: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name → keys of the cases that ``verify`` checks, with limits that clip some of its small batch."""
    DECIDES_BY_RATIOS: ClassVar[bool] = True
    """Clips depend on log-ratios alone, which ``verify`` supplies exactly in every precision. Where they
    depend on π, rounding may flip them, so ``verify`` skips the loss in bf16."""
    COLLECTIVES: ClassVar[int] = 2
    """Most collectives per micro-batch over context-parallel ranks."""
    CLIPS: ClassVar[bool] = True
    """False for a loss without limits."""
    SUPERVISED: ClassVar[bool] = False
    """True for a loss of the responses in the data, which needs no rollouts, rewards and old log-probs."""
    COMPARED: ClassVar[bool] = True
    """False for a loss that ``explain`` leaves out because its decisions equal another's."""
    LIMITS: ClassVar[tuple[str, ...]] = ()
    """The keys that ``scaled`` changes, lower limit first."""
    RUN_KEYS: ClassVar[frozenset[str]] = frozenset()
    """Keys that only have a meaning in a run; ``explain`` refuses them."""

    advantage: Literal["leave_one_out", "group_normalized"] = Field(
        "leave_one_out", description="leave_one_out: RLOO; group_normalized: GRPO's (reward - mean) / std"
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="bonus on the mean token entropy")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="penalty on the KL to the teacher or `model.checkpoint`, per response token; above 0 "
        "keeps that model in memory",
    )
    max_nonfinite_share: Share = Field(
        0.05, description="stop when a larger share of an optimizer step's sequences is not finite"
    )

    def objective(self) -> PolicyObjective:
        """Return the gradient weights: the loss itself, or a form that several losses share."""
        return self

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the gradient weights of a micro-batch; see ``PolicyObjective``."""
        raise NotImplementedError

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        """Return the loss of one response of L > 0 tokens from its log-ratios and log-probs [L]."""
        raise NotImplementedError

    def start(
        self, noise: Noise | None = None, *, longest: int, updates: int = 1, rollouts: int = 0
    ) -> LossState:
        """Return the loss at the start of a run: with measured ``noise`` in S, if any, the length of the
        longest response in tokens, the off-policy optimizer steps per rollout, and the number of rollouts
        after the learning rate's warm-up."""
        return LossState(self)

    def by_turn(self) -> bool:
        """Return True if ``definition`` applies to each turn of a trajectory; J_i is the sum over turns."""
        return getattr(self.objective(), "unit", "trajectory") == "turn"

    def band(self) -> ClipBand | None:
        """Return the limits on S, or None if the loss decides per token or has no limits."""
        return None

    def prefix_band(self) -> ClipBand | None:
        """Return the limits on the prefix sums S_t, for a loss that decides by them; otherwise None."""
        return None

    def token_reach(self, inputs: LossInputs) -> Tensor:
        """Return the factor [t] by which to scale ``LIMITS`` so that a token lies on their edge; for a loss
        with ``LIMITS`` and no band."""
        raise NotImplementedError

    def limits(self) -> dict[str, float]:
        """Return the values of ``LIMITS``."""
        return {key: getattr(self, key) for key in self.LIMITS}

    def scaled(self, factor: float) -> Self:
        """Return the loss with a fixed band ``factor`` times as wide in nats; its limits keep their ratio."""
        raise NotImplementedError

    def fitted(self, log_ratio_sums: Tensor, lengths: Tensor) -> Self:
        """Return the loss with the limits' parts that are to be measured fitted to S [N] and L [N]."""
        return self

    def widest(self) -> float:
        """Return the largest factor for ``scaled``."""
        return math.inf

    def check(self, *, off_policy_updates: int, sampled: bool) -> None:
        """Raise ``ValueError`` if the loss conflicts with the rest of the configuration: the optimizer steps
        per rollout that a band is measured from, and whether S starts from the sampler's log-probs."""

    def notes(self, *, rollouts: int, off_policy_updates: int) -> list[str]:
        """Return notes for the user before a run of ``rollouts`` after the learning rate's warm-up; a band is
        measured from ``off_policy_updates`` optimizer steps of each."""
        return []

    def noise_file(self) -> Path | None:
        """Return the file of ``calibrate`` that a run reads before it starts, if any."""
        return None

    def check_noise(self, noise: Noise, lengths: Sequence[int], origin: str) -> None:
        """Raise ``InputError`` if the band lies inside the noise in S at one of these response lengths, in
        tokens; ``origin`` describes the noise in the message."""

    def without_noise(self) -> Self:
        """Return the loss for a run that measures the noise, without keys that need a measurement."""
        return self

    def from_metrics(self, last: Callable[[str], float]) -> Self | None:
        """Return the loss with the band that a run last logged; None if it logged none. ``last`` returns the
        run's last value of a metric of ``LossState.metrics``, or NaN."""
        return self


class LossState:
    """The state of a loss during a run. This base class has none; see ``Loss.start``."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def objective(self, *, on_policy: bool = False, update: int = 1) -> PolicyObjective:
        """Return the gradient weights for an optimizer step, the ``update``-th on its rollout. ``on_policy``:
        none has moved the policy yet, so S is 0 and has no drift."""
        return self._loss.objective()

    def observe(
        self, log_ratio_sums: Tensor, lengths: Tensor, *, update: int, warm: bool, fresh: bool = True
    ) -> None:
        """Measure one off-policy mini-batch, gathered from all ranks.

        Args:
            log_ratio_sums: S [N].
            lengths: L [N].
            update: which optimizer step of its rollout it was, from 1.
            warm: the rollout began after the learning rate's warm-up. Before, updates and S are small, and a
                width measured from them would be too narrow for the rest of the run.
            fresh: no update was trained on these sequences; False from the second epoch on.
        """

    def calibrated(self) -> str | None:
        """Return a description of the measured band; None if none was measured yet."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return the current band of off-policy updates as metrics."""
        return {}

    def noise_metrics(self, lengths: Tensor, out_of_band: float) -> dict[str, float]:
        """Return metrics of the share that noise alone is expected to put out of band, for a step's
        off-policy sequences of L [N]; ``out_of_band`` is the measured share."""
        return {}

    def width_warnings(self, metrics: Mapping[str, float], *, warm: bool) -> dict[str, str]:
        """Return topic → warning about the width of the band, after one more step with these metrics, which
        include the loss's own. ``warm``: see :meth:`observe`; a warm-up is not judged."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; keys of the configuration take precedence."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A loss as its formula defines it, for one response of L tokens; differentiable by autograd. ``verify``
    checks the gradient weights against it, so it shares no code with them."""

    objective: Tensor
    """J [1] of the sequence, or [L] of its tokens, with its graph."""
    mean: Literal["sequence", "token"] = "sequence"
    """How J is averaged: within each sequence, then over sequences; or over all tokens alike."""
    clipped: float
    """1 or 0: a clip acts on the sequence, which has A ≠ 0. Token level: the share of its tokens."""
    out_of_band: bool
    """S, or the log-ratio of any token, is outside the limits, whatever the sign of A."""


def pessimistic_minimum(
    log_ratio: Tensor, advantage: float, growth: Tensor, held: Tensor, limit: Tensor | None
) -> tuple[Tensor, float]:
    """Return PPO's clipped objective, and the share of values whose gradient it removes::

        J = min(growth·A, held·A)
        J = max(J, limit·A)                  if A < 0 and there is a dual clip

    Args:
        log_ratio: [k] with its graph; ``growth`` and ``held`` are computed from it.
        advantage: A.
        growth: [k], such as the importance ratio.
        held: [k], the same for the clipped log-ratio.
        limit: largest ``growth`` that counts for A < 0; None: no dual clip.
    """
    objective = torch.minimum(growth * advantage, held * advantage)
    if advantage < 0 and limit is not None:
        objective = objective.maximum(limit * advantage)
    (slope,) = torch.autograd.grad(objective.sum(), log_ratio, retain_graph=True)
    return objective, (slope == 0).double().mean().item() if advantage else 0.0
