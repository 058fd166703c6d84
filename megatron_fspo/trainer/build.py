"""Wiring: from checked inputs to the parts of a running job, new or resumed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_fspo.data.prompts import PromptCursor
from megatron_fspo.data.walk import PromptWalk
from megatron_fspo.mcore.checkpoint import Saving, begin_save, load_checkpoint
from megatron_fspo.mcore.hf_weights import load_hf
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.startup import start
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import any_rank
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.ahead import Ahead
from megatron_fspo.trainer.folder import (
    checkpoint_folder,
    checkpoint_to_resume,
    remove_old_checkpoints,
    write_config,
)
from megatron_fspo.trainer.log import RunLog
from megatron_fspo.trainer.losses import LossState
from megatron_fspo.trainer.parts import build_engine, build_policy, load_model
from megatron_fspo.trainer.prepare import Inputs


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
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of the phases of the step under way."""
    saving: Saving | None = None
    """The checkpoint whose files are being written."""

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint of the step just done. Collective.

        Args:
            wait: until it is complete, even with ``checkpoint.asynchronous``.
        """
        self.end_save(wait=True)
        config = self.inputs.config
        folder = checkpoint_folder(config, self.step)
        if not any_rank(folder.exists(), device=self.inputs.backend.device):
            state = {"step": self.step, "cursor": self.ahead.state_dict(), "loss": self.loss.state_dict()}
            asynchronous = config.checkpoint.asynchronous and not wait
            self.saving = begin_save(self.policy, folder, state, snapshot=asynchronous)
            self.end_save(wait=not asynchronous)

    def end_save(self, *, wait: bool) -> None:
        """Complete the checkpoint being written, if there is one; without ``wait`` only if all ranks have
        written their files. Collective."""
        if self.saving is not None and self.saving.finish(wait=wait):
            self.saving = None
            if dist.get_rank() == 0:
                remove_old_checkpoints(self.inputs.config)


def build(inputs: Inputs, *, resume: bool) -> Training:
    """Start the process groups, build the policy and load its weights. Collective."""
    config = inputs.config
    checkpoint = checkpoint_to_resume(config, resume=resume)
    groups = start(inputs.backend, parallel=config.parallel, seed=config.run.seed)
    policy = build_policy(inputs, groups)
    loss = LossState(config.loss)
    cursor = PromptCursor(len(inputs.train), config.run.seed, config.data.shuffle)
    walk = PromptWalk(cursor, config.rollout.prompts)
    step = 0
    if checkpoint is None:
        load_hf(policy, config.model.checkpoint)
    else:
        state = load_checkpoint(policy, checkpoint)
        step = state["step"]
        walk.load_state_dict(state["cursor"])
        loss.load_state_dict(state["loss"])
    # Now that the run can go on: a refused one leaves the folder as it was.
    writer = dist.get_rank() == 0
    changes = write_config(config) if writer else []
    groups.control.meet("the weights to be loaded")
    log = RunLog(config, writer=writer, resume_step=step if checkpoint else None)
    for change in changes:
        log.say(f"config changed since the run began: {change}")
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
        ahead=Ahead(inputs, engine, groups, walk, step),
        log=log,
        step=step,
    )
