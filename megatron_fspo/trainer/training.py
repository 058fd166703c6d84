"""The objects of a run: parts that stay the same, the state that changes from step to step, and its
checkpoints: when they are written, and that every end of a step leaves one to resume from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.errors import Diverged, RewardError, StopRequested, TrainingError
from megatron_fspo.job.resume import checkpoint_folder, checkpoints, remove_old_checkpoints
from megatron_fspo.job.run_folder import RunFolder
from megatron_fspo.losses import LossState
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.state.checkpoint import Saving, begin_save
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.groups import ParallelGroups, any_rank
from megatron_fspo.record.log import RunLog
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.sampling import RolloutQueue
from megatron_fspo.trainer.teacher import TeacherServers

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
    """Reference of a KL penalty: the teacher, or ``model.checkpoint``. None with LoRA and no teacher (the
    reference is the policy without adapters), with servers of the teacher, or without a penalty."""
    engine: RolloutEngine
    grader: Grader | None
    """None on ranks that do not grade."""
    scoring: Scoring
    layout: PackLayout
    teacher: TeacherServers | None
    """Servers that score the responses that this rank holds; None on other ranks and without them."""
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


def save(run: Training, *, wait: bool, cursor: dict[str, Any] | None = None) -> None:
    """Write a checkpoint of the steps done; :func:`finish_save` names it. ``wait`` until its files are
    written, even with ``checkpoint.asynchronous``. ``cursor`` is the state of the prompt cursor to save; by
    default the current one. Collective."""
    config, state = run.inputs.config, run.state
    finish_save(state, config, run.log, wait=True)
    run.engine.rest()
    folder = checkpoint_folder(config, state.step)
    if not any_rank(folder.exists(), device=run.inputs.backend.device):
        content = {
            "step": state.step,
            "cursor": run.queue.prompts.state_dict() if cursor is None else cursor,
            "loss": state.loss.state_dict(),
            "base": run.base,
            "spikes": {"norms": list(state.norms), "in_a_row": state.skips_in_a_row},
        }
        asynchronous = config.checkpoint.asynchronous and not wait
        state.saving = begin_save(run.policy, folder, content, snapshot=asynchronous)
        if not asynchronous:
            state.saving.written(wait=True)
    state.saved = state.step


def finish_save(state: State, config: Config, log: RunLog, *, wait: bool, prune: bool = True) -> None:
    """Give the checkpoint that is being written, if any, its name if all ranks have written their files, or
    ``wait`` until they have; then ``prune`` old checkpoints, unless the run fails, as they may predate the
    problem. Call this after the metrics of its step are in the log. Collective."""
    if state.saving is not None and state.saving.finish(wait=wait):
        state.saving = None
        if prune and dist.get_rank() == 0:
            remove_old(config, log, state.step)


def remove_old(config: Config, log: RunLog, step: int) -> None:
    """Remove old checkpoints, but keep the newest from before the current streak of zero-variance steps."""
    stays = remove_old_checkpoints(config, good_step=step - log.zero_variance_steps())
    for path, problem in stays.items():
        log.warn_once(f"{path.name} stays", f"{path} cannot be removed ({problem}): remove it manually")


@contextmanager
def resumable(run: Training, metrics: dict[str, float]) -> Iterator[None]:
    """Leave the run so that ``--resume`` can repeat the step, whatever ends the block. ``metrics`` are those
    of the step so far, which are logged if the policy diverged."""
    state, config, log, cursor = run.state, run.inputs.config, run.log, run.queue.prompts.state_dict()
    try:
        yield
    except StopRequested:
        if state.saved < state.step:
            save(run, wait=True, cursor=cursor)
        raise
    except RewardError as error:
        going_on = "no step was done: --resume begins at step 1"
        if state.step:
            save(run, wait=True, cursor=cursor)
            finish_save(state, config, log, wait=True, prune=False)
            going_on = f"--resume continues after step {state.step}"
        raise RewardError(f"step {state.step + 1}: {error}; {going_on}") from error
    except Diverged as error:
        finish_save(state, config, log, wait=True, prune=False)
        log.step(state.step + 1, metrics | error.metrics | log.timings)
        written = checkpoints(config)
        last = f"The last checkpoint is {written[-1]}" if written else "There is no checkpoint yet"
        raise TrainingError(
            f"{error}. {last}. Use a smaller optimizer.lr, or fewer batch.mini_batches or batch.epochs"
        ) from None


@contextmanager
def end_of_step(run: Training, folder: RunFolder, metrics: dict[str, float]) -> Iterator[None]:
    """Save, log, and name the checkpoint of a step after the block, which may evaluate and add to
    ``metrics``. After all of this raise ``RewardError`` if the evaluation failed, or ``StopRequested``."""
    config, state, log = run.inputs.config, run.state, run.log
    options, last = config.checkpoint, state.step == config.run.steps
    stopping = run.groups.control.barrier(f"the end of step {state.step}")
    failed: RewardError | None = None
    try:
        yield
    except RewardError as error:
        failed = error
    except StopRequested:
        stopping = True
        log.say(f"no evaluation after step {state.step}: stopped while waiting for grades")
    end = last or stopping or failed is not None
    if end or any(every and state.step % every == 0 for every in (options.every, options.milestones)):
        with log.phase("save_checkpoint"):
            save(run, wait=end)
    folder.check()
    # Log the metrics before the checkpoint gets its name, so that a resumed run has them.
    log.step(state.step, metrics | log.timings)
    finish_save(state, config, log, wait=failed is not None, prune=failed is None)
    if failed is not None:
        raise failed
    if stopping and not last:
        raise StopRequested("a stop was requested during the step")
