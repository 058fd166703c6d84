"""Checkpoints of a run: when they are written, and that every end of a step leaves one to resume from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.errors import RewardError, StopRequested, TrainingError
from megatron_fspo.job.folder import checkpoint_folder, checkpoints, remove_old_checkpoints
from megatron_fspo.job.run_folder import RunFolder
from megatron_fspo.mcore.checkpoint import begin_save
from megatron_fspo.parallel.groups import any_rank
from megatron_fspo.record.log import RunLog
from megatron_fspo.trainer.optimize import Diverged
from megatron_fspo.trainer.training import Training


def save(run: Training, *, wait: bool, cursor: dict[str, Any] | None = None) -> None:
    """Write a checkpoint of the steps done; :func:`end_save` gives it its name. ``wait`` until its files are
    written, even with ``checkpoint.asynchronous``. ``cursor`` is the state of the prompt cursor to save; by
    default the current one. Collective."""
    end_save(run, wait=True)
    run.engine.rest()
    config, state = run.inputs.config, run.state
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


def end_save(run: Training, *, wait: bool, prune: bool = True) -> None:
    """Give the checkpoint that is being written, if any, its name if all ranks have written their files, or
    ``wait`` until they have; then ``prune`` old checkpoints, unless the run fails, as they may predate the
    problem. Call this after the metrics of its step are in the log. Collective."""
    state = run.state
    if state.saving is not None and state.saving.finish(wait=wait):
        state.saving = None
        if prune and dist.get_rank() == 0:
            remove_old(run.inputs.config, run.log, state.step)


def remove_old(config: Config, log: RunLog, step: int) -> None:
    """Remove old checkpoints, but keep the newest from before the current streak of steps without spread."""
    stays = remove_old_checkpoints(config, good_step=step - log.steps_without_spread())
    for path, problem in stays.items():
        log.warn_once(f"{path.name} stays", f"{path} cannot be removed ({problem}): remove it manually")


@contextmanager
def resumable(run: Training, metrics: dict[str, float]) -> Iterator[None]:
    """Leave the run so that ``--resume`` can repeat the step, whatever ends the block. ``metrics`` are those
    of the step so far, which are logged if the policy diverged."""
    state, cursor = run.state, run.queue.prompts.state_dict()
    try:
        yield
    except StopRequested:
        if state.saved < state.step:
            save(run, wait=True, cursor=cursor)
        raise
    except RewardError as error:
        going_on = "--resume starts over"  # nothing to save before the first step
        if state.step:
            save(run, wait=True, cursor=cursor)
            end_save(run, wait=True, prune=False)
            going_on = f"--resume continues after step {state.step}"
        raise RewardError(f"step {state.step + 1}: {error}; {going_on}") from error
    except Diverged as error:
        end_save(run, wait=True, prune=False)
        run.log.step(state.step + 1, metrics | error.metrics | run.log.timings)
        written = checkpoints(run.inputs.config)
        last = f"The last checkpoint is {written[-1]}" if written else "There is no checkpoint yet"
        raise TrainingError(
            f"{error}. {last}. Use a smaller optimizer.lr, or fewer batch.mini_batches or batch.epochs"
        ) from None


@contextmanager
def end_of_step(run: Training, folder: RunFolder, metrics: dict[str, float]) -> Iterator[None]:
    """Save, log, and name the checkpoint of a step after the block, which may evaluate and add to
    ``metrics``. After all of this raise ``RewardError`` if the evaluation failed, or ``StopRequested``."""
    options, state, log = run.inputs.config.checkpoint, run.state, run.log
    last = state.step == run.inputs.config.run.steps
    stopping = run.groups.control.meet(f"the end of step {state.step}")
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
        with log.phase("save_checkpoint", 1, ""):
            save(run, wait=end)
    folder.check()
    # Log the metrics before the checkpoint gets its name, so that a resumed run has them.
    log.step(state.step, metrics | log.timings)
    end_save(run, wait=failed is not None, prune=failed is None)
    if failed is not None:
        raise failed
    if stopping and not last:
        raise StopRequested("a stop was requested during the step")
