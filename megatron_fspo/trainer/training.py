"""The objects of a run: parts that stay the same, and the state that changes from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fspo.errors import StopRequested
from megatron_fspo.losses import LossState
from megatron_fspo.mcore.checkpoint import Saving
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.groups import ParallelGroups, any_rank
from megatron_fspo.record.log import RunLog
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.sampling import RolloutQueue

Draw = Callable[[Path], Mapping[str, str]]
"""Function from the run folder to a mapping of names to the text of ``<svg>`` elements."""


@dataclass(kw_only=True)
class State:
    """What changes from step to step, beside the weights; the same on all ranks."""

    step: int
    """Number of steps done, which is also the weight version."""
    loss: LossState
    norms: deque[float]
    """Norms of the last gradients that were not spikes."""
    skips_in_a_row: int
    """Optimizer steps skipped since the last one taken."""
    saved: int
    """Number of steps in the newest checkpoint; 0 without one."""
    saving: Saving | None = None
    """The checkpoint that is being written."""
    slow_for: dict[int, int] = field(default_factory=dict)
    """Rank → number of consecutive steps in which it was slow."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job in progress."""

    inputs: Inputs
    groups: ParallelGroups
    policy: Policy
    reference: Model | None
    """Reference policy of a KL penalty: always ``model.checkpoint``. None with LoRA (the reference is the
    policy without adapters) or without a penalty."""
    engine: RolloutEngine
    grader: Grader | None
    """None on ranks that do not grade."""
    scoring: Scoring
    layout: PackLayout
    queue: RolloutQueue
    log: RunLog
    state: State
    resumed: bool
    """True if the job continues from a checkpoint."""
    base: str | None = None
    """Hash of the base weights of the adapters; None without LoRA."""
    fp8_modules: int = 0
    """Number of the policy's matrices that multiply in FP8."""

    def raise_if_stopping(self) -> None:
        """Raise ``StopRequested`` on all ranks if a stop was requested on any. Collective."""
        if any_rank(self.groups.control.stop_requested, device=self.inputs.backend.device):
            raise StopRequested("a stop was requested during the step")
