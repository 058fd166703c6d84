"""Wiring: from checked inputs to the parts of a running job, new or resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fspo.data.prompts import PromptCursor
from megatron_fspo.data.walk import PromptWalk
from megatron_fspo.mcore.checkpoint import Saving, begin_save, load_checkpoint
from megatron_fspo.mcore.fp8 import probe_fp8
from megatron_fspo.mcore.hf_weights import load_hf
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.startup import start
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import any_rank
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.ahead import Ahead
from megatron_fspo.trainer.batches import make_mini_batches
from megatron_fspo.trainer.folder import (
    checkpoint_folder,
    remove_old_checkpoints,
    write_config,
)
from megatron_fspo.trainer.log import RunLog
from megatron_fspo.trainer.losses import LossState, unfinished_calibration
from megatron_fspo.trainer.made_with import check_made_with, made_with
from megatron_fspo.trainer.parts import build_engine, build_policy, load_model
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.step import Step, is_under_way, read_step


@dataclass(kw_only=True)
class Training:
    """A job under way."""

    inputs: Inputs
    groups: ParallelGroups
    policy: Policy
    reference: Model | None
    """What a KL penalty pulls towards: ``model.checkpoint``, for good."""
    engine: RolloutEngine
    scoring: Scoring
    loss: LossState
    ahead: Ahead
    log: RunLog
    step: int
    """Steps done. The weight version: one per step."""
    resumed: bool
    """Whether it goes on from a checkpoint."""
    fp8_modules: int = 0
    """Matrices of the policy that multiply in FP8."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of the phases of the step under way."""
    under_way: Step | None = None
    """The step whose optimizer steps are being taken."""
    saving: Saving | None = None
    """The checkpoint whose files are being written."""

    def save(self, *, wait: bool, cursor: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of the steps done, and of the one under way; :meth:`end_save` gives it its name.
        Collective.

        Args:
            wait: until its files are written, even with ``checkpoint.asynchronous``.
            cursor: where the walk over the prompts stood, if not where it stands.
        """
        self.end_save(wait=True)
        config, step = self.inputs.config, self.under_way
        folder = checkpoint_folder(config, self.step, len(step.updates) if step else 0)
        if not any_rank(folder.exists(), device=self.inputs.backend.device):
            state = {
                "step": self.step,
                "cursor": self.ahead.state_dict() if cursor is None else cursor,
                "loss": self.loss.state_dict(),
                "under_way": step.state_dict() if step else None,
                "made_with": made_with(config, dist.get_world_size()),
            }
            asynchronous = config.checkpoint.asynchronous and not wait
            self.saving = begin_save(
                self.policy,
                folder,
                state,
                snapshot=asynchronous,
                more=partial(step.write, groups=self.groups) if step else None,
            )
            if not asynchronous:
                self.saving.written(wait=True)

    def stopping(self) -> bool:
        """Whether the job was asked to stop; the same on all ranks. Collective."""
        return any_rank(self.groups.control.stop_requested, device=self.inputs.backend.device)

    def end_save(self, *, wait: bool) -> None:
        """Give the checkpoint being written, if there is one, its name; without ``wait`` only if all ranks
        have written their files. To be called when the row of its step is in the log. Collective."""
        if self.saving is not None and self.saving.finish(wait=wait):
            self.saving = None
            if dist.get_rank() == 0:
                remove_old_checkpoints(self.inputs.config)


def build(inputs: Inputs, checkpoint: Path | None) -> Training:
    """Start the process groups, build the policy and load its weights. Collective.

    Args:
        checkpoint: of the run, to go on from.
    """
    config = inputs.config
    groups = start(inputs.backend, parallel=config.parallel, seed=config.run.seed)
    policy = build_policy(inputs, groups)
    loss = LossState(config.loss, inputs.noise, longest=config.rollout.max_response_tokens)
    cursor = PromptCursor(len(inputs.train), config.run.seed, config.data.shuffle)
    walk = PromptWalk(cursor, config.rollout.prompts)
    step = 0
    under_way: Step | None = None
    if checkpoint is None:
        load_hf(policy, config.model.checkpoint)
    else:
        state = load_checkpoint(policy, checkpoint)
        step = state["step"]
        walk.load_state_dict(state["cursor"])
        loss.load_state_dict(state["loss"])
        if is_under_way(state):
            check_made_with(config, dist.get_world_size(), state.get("made_with"))
            pack = partial(
                make_mini_batches, config, inputs.arch, groups=groups, device=inputs.backend.device
            )
            under_way = read_step(checkpoint, state["under_way"], inputs.train, pack)
    # Now that the run can go on: a refused one leaves the folder as it was.
    writer = dist.get_rank() == 0
    changes = write_config(config) if writer else []
    if writer:
        remove_old_checkpoints(config)  # a killed run may not have come to its end
    groups.control.meet("the weights to be loaded")
    log = RunLog(config, writer=writer, resume_step=step if checkpoint else None)
    for change in changes:
        log.say(f"config changed since the run began: {change}")
    if warning := unfinished_calibration(config):
        log.say(warning)
    fp8_modules = probe_fp8(policy)
    engine = build_engine(inputs, policy)
    engine.update_weights(step)
    return Training(
        inputs=inputs,
        groups=groups,
        policy=policy,
        reference=load_model(inputs, groups) if config.loss.kl_coef else None,
        engine=engine,
        scoring=Scoring(
            groups=groups, vocab_size=inputs.arch.vocab_size, temperature=config.rollout.temperature
        ),
        loss=loss,
        # A step under way has its prompts.
        ahead=Ahead(inputs, engine, groups, walk, step + (under_way is not None)),
        log=log,
        step=step,
        resumed=checkpoint is not None,
        fp8_modules=fp8_modules,
        under_way=under_way,
    )
