"""Wiring: from checked inputs to the parts of a running job, new or resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.data.cursor import PromptCursor, mixture
from megatron_fspo.errors import InputError
from megatron_fspo.job.folder import (
    checkpoint_folder,
    config_changes,
    put_aside,
    remove_old_checkpoints,
    write_config,
)
from megatron_fspo.job.heart import beating
from megatron_fspo.mcore.checkpoint import Saving, begin_save, load_checkpoint
from megatron_fspo.mcore.fp8 import probe_fp8
from megatron_fspo.mcore.hf_weights import load_hf
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.startup import start
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import any_rank
from megatron_fspo.record.log import RunLog
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.batches import make_mini_batches
from megatron_fspo.trainer.losses import LossState, band_notes
from megatron_fspo.trainer.made_with import check_made_with, made_with
from megatron_fspo.trainer.parts import build_engine, build_policy, load_model, open_servers
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout_queue import RolloutQueue
from megatron_fspo.trainer.sampling import make_grader
from megatron_fspo.trainer.spikes import GradientSpikes
from megatron_fspo.trainer.step import Step, is_under_way, read_step

Draw = Callable[[Path], Mapping[str, str]]
"""The folder of a run → name → the text of an ``<svg>``."""


@dataclass(kw_only=True)
class Training:
    """A job under way."""

    inputs: Inputs
    groups: ParallelGroups
    policy: Policy
    reference: Model | None
    """What a KL penalty pulls towards: ``model.checkpoint``, for good."""
    engine: RolloutEngine
    grader: Grader | None
    """On ranks that grade."""
    scoring: Scoring
    loss: LossState
    spikes: GradientSpikes
    queue: RolloutQueue
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
    draw: Draw | None = None
    """Makes pictures for the trackers, from the folder of the run."""
    slow_for: dict[int, int] = field(default_factory=dict)
    """Rank → steps in a row in which it was slow; the same on all ranks."""
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
        self.engine.rest()
        config, step = self.inputs.config, self.under_way
        folder = checkpoint_folder(config, self.step, len(step.updates) if step else 0)
        if not any_rank(folder.exists(), device=self.inputs.backend.device):
            state = {
                "step": self.step,
                "cursor": self.queue.state_dict() if cursor is None else cursor,
                "loss": self.loss.state_dict(),
                "spikes": self.spikes.state_dict(),
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

    def beating(self, job: str) -> AbstractContextManager[None]:
        """Signs of life in the folder of the run; ``job`` is the nonce of its lock."""
        return beating(
            self.inputs.config.run_folder,
            job,
            self.log.activity,
            lambda: self.groups.control.waits,
            rank=dist.get_rank(),
            size=dist.get_world_size(),
        )

    def stopping(self) -> bool:
        """Whether the job was asked to stop; the same on all ranks. Collective."""
        return any_rank(self.groups.control.stop_requested, device=self.inputs.backend.device)

    def end_save(self, *, wait: bool, prune: bool = True) -> None:
        """Give the checkpoint being written, if there is one, its name; without ``wait`` only if all ranks
        have written their files. To be called when the row of its step is in the log. Collective.

        Args:
            prune: remove old checkpoints then. Not where the run fails: they may be from before the trouble.
        """
        if self.saving is not None and self.saving.finish(wait=wait):
            self.saving = None
            if prune and dist.get_rank() == 0:
                _prune(self.inputs.config, self.log, self.step)


def build(inputs: Inputs, checkpoints: Sequence[Path] = (), *, older: bool = False) -> Training:
    """Start the process groups, build the policy and load its weights. Collective.

    What is in the folder of the run changes only when all else has gone well.

    Args:
        checkpoints: of the run, oldest first, to go on from the newest; none for a run that starts.
        older: go on from the newest that can be read.
    """
    config = inputs.config
    groups = start(inputs.backend, parallel=config.parallel, seed=config.run.seed)
    servers = open_servers(inputs, groups)
    policy = build_policy(inputs, groups)
    loss = LossState(
        config.loss,
        inputs.noise,
        longest=config.rollout.max_response_tokens,
        updates=config.off_policy_updates,
    )
    spikes = GradientSpikes(config.optimizer)
    sets = mixture(inputs.train, config.data)
    prompts = PromptCursor(sets, config.run.seed, size=config.rollout.prompts, shuffle=config.data.shuffle)
    step = 0
    under_way: Step | None = None
    damaged: list[str] = []
    if not checkpoints:
        load_hf(policy, config.model.checkpoint)
    else:
        checkpoint, state, damaged = _load_newest(policy, checkpoints, older=older)
        step = state["step"]
        prompts.load_state_dict(state["cursor"])
        loss.load_state_dict(state["loss"])
        if "spikes" in state:  # not in a checkpoint of before they were looked for
            spikes.load_state_dict(state["spikes"])
        if is_under_way(state):
            under_way = _read_step(inputs, checkpoint, state, groups)
    groups.control.meet("the weights to be loaded")
    fp8_modules = probe_fp8(policy)
    reference = load_model(inputs, groups) if config.loss.kl_coef else None
    engine = build_engine(inputs, policy, servers, *([reference] if reference else []))
    engine.update_weights(step)
    grader = make_grader(config, groups)
    log = _open_folder(config, step if checkpoints else None, checkpoints, damaged)
    for note in inputs.notes:
        log.say(note)
    groups.control.meet("the first rank to open the records of the run")
    return Training(
        inputs=inputs,
        groups=groups,
        policy=policy,
        reference=reference,
        engine=engine,
        grader=grader,
        scoring=Scoring(
            groups=groups, vocab_size=inputs.arch.vocab_size, temperature=config.rollout.temperature
        ),
        loss=loss,
        spikes=spikes,
        # A step under way has its prompts.
        queue=RolloutQueue(inputs, engine, groups, grader, prompts, step + (under_way is not None)),
        log=log,
        step=step,
        resumed=bool(checkpoints),
        fp8_modules=fp8_modules,
        under_way=under_way,
    )


def _load_newest(
    policy: Policy, checkpoints: Sequence[Path], *, older: bool
) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest checkpoint, loaded, and its state; with ``older`` the newest that can be read, and what is
    wrong with those after it, newest first. Collective.

    Raises:
        InputError: on every rank; the newest cannot be read, and no other may be taken or can be.
    """
    problems: list[str] = []
    for checkpoint in reversed(checkpoints):
        try:
            return checkpoint, load_checkpoint(policy, checkpoint), problems
        except InputError as error:
            problems.append(str(error))
        if not older:
            break
    if older or len(checkpoints) == 1:
        raise InputError(problems[0])
    raise InputError(
        f"{problems[0]}. The checkpoint before it is {checkpoints[-2]}: go on from there with --resume auto"
    )


def _read_step(inputs: Inputs, checkpoint: Path, state: dict[str, Any], groups: ParallelGroups) -> Step:
    """The step under way that a checkpoint holds."""
    config = inputs.config
    check_made_with(config, dist.get_world_size(), state.get("made_with"))
    device = inputs.backend.device
    pack = partial(make_mini_batches, config, inputs.arch, groups=groups, device=device)
    return read_step(checkpoint, state["under_way"], inputs.train, pack)


def _open_folder(
    config: Config, step: int | None, checkpoints: Sequence[Path], damaged: Sequence[str]
) -> RunLog:
    """The log of a run that can go on: the first rank writes into the folder from here on.

    Args:
        step: of the checkpoint that the run goes on from; None for one that starts.
        damaged: what is wrong with the newest of the checkpoints, newest first.
    """
    if dist.get_rank() != 0:
        return RunLog(config, writer=False, resume_step=step)
    changes = config_changes(config)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(config, writer=True, resume_step=step)
    write_config(config)
    for checkpoint, problem in zip(reversed(checkpoints), damaged, strict=False):
        log.say(f"{problem}. It is now {put_aside(checkpoint).name}, and the run goes on from the one before")
    for note in band_notes(config):
        log.warn_once(note, note)
    _prune(config, log, step or 0)  # a killed run may not have come to its end
    for change in changes:
        log.say(f"config changed since the run began: {change}")
    return log


def _prune(config: Config, log: RunLog, step: int) -> None:
    """Remove old checkpoints, but not the last one from before steps that had nothing to learn from."""
    stays = remove_old_checkpoints(config, good_step=step - log.steps_without_spread())
    for path, problem in stays.items():
        log.warn_once(f"{path.name} stays", f"{path} cannot be removed ({problem}): remove it by hand")
