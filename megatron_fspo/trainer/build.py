"""Wiring: from checked inputs to what a run consists of, new or resumed; evaluation shares some of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.config.loading import config_changes
from megatron_fspo.data.cursor import PromptCursor, mixture
from megatron_fspo.errors import InputError
from megatron_fspo.job.folder import checkpoint_folder, put_aside, remove_old_checkpoints, write_config
from megatron_fspo.losses import LossState
from megatron_fspo.mcore.checkpoint import Saving, begin_save, load_checkpoint
from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.fp8 import probe_fp8, without_fp8
from megatron_fspo.mcore.hf_weights import (
    base_tensors,
    fill_adapters,
    hf_tensors,
    load_hf,
    scaled_adapter_tensors,
)
from megatron_fspo.mcore.offload import Offload
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.score import score_sequences
from megatron_fspo.mcore.startup import start
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.groups import ParallelGroups, any_rank, share
from megatron_fspo.record.log import RunLog
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.client import proof
from megatron_fspo.rollout.client.connect import Needs, connect, settle
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs, needs_of
from megatron_fspo.trainer.rollout import layout_of
from megatron_fspo.trainer.sampling import RolloutQueue, make_grader
from megatron_fspo.weights import read_adapters
from megatron_fspo.weights.folder import digest

Draw = Callable[[Path], Mapping[str, str]]
"""The folder of a run → name → the text of an ``<svg>``."""


@dataclass(kw_only=True)
class Training:
    """A job under way."""

    inputs: Inputs
    groups: ParallelGroups
    policy: Policy
    reference: Model | None
    """The policy that a KL penalty pulls towards: ``model.checkpoint``, for good. None: the
    policy without its adapters, or there is no penalty."""
    engine: RolloutEngine
    grader: Grader | None
    """None on ranks that do not grade."""
    scoring: Scoring
    layout: PackLayout
    loss: LossState
    norms: deque[float]
    """Norms of the last gradients that were no spikes."""
    skips_in_a_row: int
    """Optimizer steps skipped, as spikes, since the last that was taken."""
    queue: RolloutQueue
    log: RunLog
    step: int
    """Steps done. The weight version: one per step."""
    resumed: bool
    """True if it goes on from a checkpoint."""
    saved: int
    """Steps after which ``--resume`` goes on: those of the newest checkpoint; 0 without one."""
    base: str | None = None
    """Hash of the weights that adapters belong to."""
    fp8_modules: int = 0
    """Matrices of the policy that multiply in FP8."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of the phases of the step under way."""
    draw: Draw | None = None
    """Makes pictures for the trackers, from the folder of the run."""
    slow_for: dict[int, int] = field(default_factory=dict)
    """Rank → steps in a row in which it was slow; the same on all ranks."""
    saving: Saving | None = None
    """The checkpoint whose files are being written."""

    def save(self, *, wait: bool, cursor: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of the steps done; :meth:`end_save` gives it its name. Collective.

        Args:
            wait: until its files are written, even with ``checkpoint.asynchronous``.
            cursor: where the prompts stood, if not where they stand.
        """
        self.end_save(wait=True)
        self.engine.rest()
        folder = checkpoint_folder(self.inputs.config, self.step)
        if not any_rank(folder.exists(), device=self.inputs.backend.device):
            state = {
                "step": self.step,
                "cursor": self.queue.prompts.state_dict() if cursor is None else cursor,
                "loss": self.loss.state_dict(),
                "base": self.base,
                "spikes": {"norms": list(self.norms), "in_a_row": self.skips_in_a_row},
            }
            asynchronous = self.inputs.config.checkpoint.asynchronous and not wait
            self.saving = begin_save(self.policy, folder, state, snapshot=asynchronous)
            if not asynchronous:
                self.saving.written(wait=True)
        self.saved = self.step

    def end_save(self, *, wait: bool, prune: bool = True) -> None:
        """Give the checkpoint being written, if there is one, its name; without ``wait`` only if all ranks
        have written their files. To be called when the row of its step is in the log. Collective.

        Args:
            wait: until all ranks have written their files.
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
        inputs: of :func:`~megatron_fspo.trainer.prepare.prepare`.
        checkpoints: of the run, oldest first, to go on from the newest; none for a run that starts.
        older: go on from the newest that can be read.
    """
    config = inputs.config
    groups = start(inputs.backend, parallel=config.parallel, seed=config.run.seed)
    servers = open_servers(inputs, groups, trains=True)
    policy = Policy(
        inputs.arch,
        inputs.backend,
        groups,
        parallel=config.parallel,
        dtype=inputs.dtype,
        optimizer=config.optimizer.over(config.optimizer_steps),
        recompute=config.model.recompute == "full",
        fp8=config.fp8,
    )
    longest, updates = config.rollout.max_response_tokens, config.off_policy_updates
    loss = config.loss.start(inputs.noise, longest=longest, updates=updates)
    sets = mixture(inputs.train, config.data)
    prompts = PromptCursor(sets, config.run.seed, size=config.rollout.prompts, shuffle=config.data.shuffle)
    base = _base(inputs)
    state, damaged = _load(inputs, policy, base, checkpoints, older=older)
    if checkpoints:
        prompts.load_state_dict(state["cursor"])
        loss.load_state_dict(state["loss"])
    step, spikes = state["step"], state["spikes"]
    groups.control.meet("the weights to be loaded")
    fp8_modules = probe_fp8(policy)
    reference = load_model(inputs, groups) if config.loss.kl_coef and not inputs.arch.adapters else None
    engine = build_engine(inputs, policy, servers, *([reference] if reference else []))
    engine.update_weights(step)
    grader = make_grader(config, groups)
    log = _open_folder(inputs, step if checkpoints else None, checkpoints, damaged)
    groups.control.meet("the first rank to open the records of the run")
    return Training(
        inputs=inputs,
        groups=groups,
        policy=policy,
        reference=reference,
        engine=engine,
        grader=grader,
        scoring=Scoring(
            groups=groups,
            vocab_size=inputs.arch.vocab_size,
            temperature=config.rollout.temperature,
            head=inputs.backend.head,
        ),
        layout=layout_of(config, inputs.arch, groups, inputs.backend),
        loss=loss,
        norms=deque(spikes["norms"], maxlen=config.optimizer.skip_window),
        skips_in_a_row=spikes["in_a_row"],
        queue=RolloutQueue(inputs, engine, groups, grader, prompts, step),
        log=log,
        step=step,
        resumed=bool(checkpoints),
        saved=step,
        base=base,
        fp8_modules=fp8_modules,
    )


def _base(inputs: Inputs) -> str | None:
    """The hash of all weights of ``model.checkpoint``, where adapters are trained; the first rank reads them.
    Collective."""
    if inputs.arch.adapters is None:
        return None
    value = None
    if dist.get_rank() == 0:
        files = sorted(inputs.config.model.checkpoint.rglob("*.safetensors"))
        files += sorted(inputs.config.model.checkpoint.rglob("*.distcp"))
        value = sha256("".join(map(digest, files)).encode()).hexdigest()
    assert dist.group.WORLD is not None
    return share(value, group=dist.group.WORLD)


def _load(
    inputs: Inputs, policy: Policy, base: str | None, checkpoints: Sequence[Path], *, older: bool
) -> tuple[dict[str, Any], list[str]]:
    """Load the policy of a new run, or the newest checkpoint: as :func:`_load_newest`. Collective.

    Raises:
        InputError: on every rank; also where adapters belong to other weights than ``base``.
    """
    config = inputs.config
    if not checkpoints or inputs.arch.adapters:
        load_hf(policy, config.model.checkpoint, seed=config.run.seed)
    if not checkpoints:
        if inputs.arch.adapters and config.lora.start:
            given = read_adapters(config.lora.start, inputs.arch)
            fill_adapters(policy, lambda name, _: given[name])
            policy.weights_loaded()
        return {"step": 0, "spikes": {"norms": [], "in_a_row": 0}}, []
    state, damaged = _load_newest(policy, checkpoints, older=older)
    if state.get("base") != base:
        raise InputError(
            f"{checkpoints[-1]} is of adapters to weights that {config.model.checkpoint} lacks, or of "
            "a run without: model.checkpoint and lora.rank must be those of the run"
        )
    return state, damaged


def _load_newest(
    policy: Policy, checkpoints: Sequence[Path], *, older: bool
) -> tuple[dict[str, Any], list[str]]:
    """Load the newest checkpoint, or with ``older`` the newest that can be read; returns its state, and what
    is wrong with those after it, newest first. Collective.

    Raises:
        InputError: on every rank; the newest cannot be read, and no other may be taken or can be.
    """
    problems: list[str] = []
    for checkpoint in reversed(checkpoints):
        try:
            return load_checkpoint(policy, checkpoint), problems
        except InputError as error:
            problems.append(str(error))
        if not older:
            break
    if older or len(checkpoints) == 1:
        raise InputError(problems[0])
    raise InputError(
        f"{problems[0]}. The checkpoint before it is {checkpoints[-2]}: go on from there with --resume auto"
    )


def _open_folder(
    inputs: Inputs, step: int | None, checkpoints: Sequence[Path], damaged: Sequence[str]
) -> RunLog:
    """The log of a run that can go on: the first rank writes into the folder from here on.

    ``step`` is that of the checkpoint that the run goes on from; None for one that starts. Of the
    ``checkpoints``, oldest first, ``damaged`` says what is wrong with the newest, newest first.
    """
    config = inputs.config
    if dist.get_rank() != 0:
        return RunLog(config, writer=False, resume_step=step)
    changes = config_changes(config)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(config, writer=True, resume_step=step)
    write_config(config)
    for checkpoint, problem in zip(reversed(checkpoints), damaged, strict=False):
        log.say(f"{problem}. It is now {put_aside(checkpoint).name}, and the run goes on from the one before")
    for note in config.loss.notes(
        steps=config.run.steps,
        updates=config.batch.mini_batches * config.batch.epochs,
        off_policy_updates=config.off_policy_updates,
        warmup_updates=config.optimizer.warmup_steps,
    ):
        log.warn_once(note, note)
    _prune(config, log, step or 0)  # a killed run may not have come to its end
    for change in changes:
        log.say(f"config changed since the run began: {change}")
    for note in inputs.notes:
        log.say(note)
    return log


def _prune(config: Config, log: RunLog, step: int) -> None:
    """Remove old checkpoints, but not the last one from before steps that had nothing to learn from."""
    stays = remove_old_checkpoints(config, good_step=step - log.steps_without_spread())
    for path, problem in stays.items():
        log.warn_once(f"{path.name} stays", f"{path} cannot be removed ({problem}): remove it by hand")


def load_model(inputs: Inputs, groups: ParallelGroups) -> Model:
    """``model.checkpoint`` in the policy's layout, without gradients or an optimizer. Collective."""
    config = inputs.config
    model = Model(
        replace(inputs.arch, adapters=None),
        inputs.backend,
        groups,
        parallel=config.parallel,
        dtype=inputs.dtype,
        fp8=config.fp8,
    )
    load_hf(model, config.model.checkpoint)
    return model


def open_servers(inputs: Inputs, groups: ParallelGroups, *, trains: bool = False) -> Leader | None:
    """On the first rank, what talks to the servers. To be called before a model is built: servers on the
    trainer's GPUs give up their memory. With ``trains`` all must be able to do what training needs.
    Collective.

    Raises:
        TrainingError: one did not give it up.
        InputError: one cannot.
    """
    config, leader = inputs.config, None
    if config.rollout.engine != "vllm":
        return None
    if dist.get_rank() == 0:
        leader = connect(config.vllm, inputs.arch.vocab_size)
        needs = needs_of(config) if trains else Needs()
        leader.loop.run(settle(leader, needs, colocated=config.vllm.colocated))
    groups.control.meet("the servers to give up their memory")
    return leader


def build_engine(inputs: Inputs, model: Model, servers: Leader | None, *others: Model) -> RolloutEngine:
    """The sampler that ``rollout.engine`` names, of this model; ``others`` are models that only training
    needs. ``servers`` are those of :func:`open_servers`."""
    vocab_size, options = inputs.arch.vocab_size, inputs.config.vllm
    if inputs.config.rollout.engine == "embedded":
        decoder = Decoder(model.chunks, model.groups, vocab_size=vocab_size)
        return EmbeddedEngine(decoder, max_batch=inputs.config.rollout.max_batch)

    return VLLMEngine(
        Trainer(
            tensors=partial(scaled_adapter_tensors if model.arch.adapters else hf_tensors, model),
            base=partial(base_tensors, model) if model.arch.adapters else None,
            score=partial(canary_scores, model),
        ),
        model.groups,
        servers,
        canary_sequences=proof.canary_sequences(vocab_size, inputs.arch.max_position_embeddings),
        dtype=inputs.dtype,
        tolerance=options.canary_tolerance,
        memory=Offload(model, *others) if options.colocated else None,
    )


def canary_scores(model: Model, sequences: Sequence[Sequence[int]]) -> list[Tensor] | None:
    """Per sequence of n tokens the log-probs [n - 1] of all but the first, on the first rank. Collective.

    In bfloat16 also where training multiplies in FP8: what is to be proven is that weights are equal, and
    noise would cover small differences.
    """
    scoring = Scoring(
        groups=model.groups, vocab_size=model.arch.vocab_size, temperature=1.0, head=model.backend.head
    )
    with without_fp8(model):
        return score_sequences(
            lambda batches: model.score(batches, scoring),
            sequences,
            arch=model.arch,
            groups=model.groups,
            parallel=model.parallel,
            device=model.backend.device,
        )
