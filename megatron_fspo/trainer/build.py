"""Builds the objects of a new or resumed run from its checked inputs; evaluation uses some of them."""

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
from megatron_fspo.config.loading import config_changes, save_config
from megatron_fspo.data.cursor import PromptCursor, digest_of, mixture
from megatron_fspo.errors import InputError
from megatron_fspo.job.folder import checkpoint_folder, put_aside, remove_old_checkpoints
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
"""Function from the run folder to a mapping of names to the text of ``<svg>`` elements."""


@dataclass(kw_only=True)
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
    loss: LossState
    norms: deque[float]
    """Norms of the last gradients that were not spikes."""
    skips_in_a_row: int
    """Optimizer steps skipped as spikes since the last one taken."""
    queue: RolloutQueue
    log: RunLog
    step: int
    """Number of steps done, which is also the weight version."""
    resumed: bool
    """True if the job continues from a checkpoint."""
    saved: int
    """Number of steps in the newest checkpoint; 0 without one."""
    base: str | None = None
    """Hash of the base weights of the adapters; None without LoRA."""
    fp8_modules: int = 0
    """Number of the policy's matrices that multiply in FP8."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the current step."""
    draw: Draw | None = None
    """Draws pictures of the run for the trackers."""
    slow_for: dict[int, int] = field(default_factory=dict)
    """Rank → number of consecutive steps in which it was slow; the same on all ranks."""
    saving: Saving | None = None
    """The checkpoint that is being written."""

    def save(self, *, wait: bool, cursor: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of the steps done; :meth:`end_save` gives it its name. Collective.

        Args:
            wait: wait until its files are written, even with ``checkpoint.asynchronous``.
            cursor: state of the prompt cursor to save; default: the current state.
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
        """Give the checkpoint that is being written, if any, its name if all ranks have written their files.
        Call this after the metrics of its step are in the log. Collective.

        Args:
            wait: wait until all ranks have written their files.
            prune: then remove old checkpoints. Set to False if the run fails: they may predate the problem.
        """
        if self.saving is not None and self.saving.finish(wait=wait):
            self.saving = None
            if prune and dist.get_rank() == 0:
                _prune(self.inputs.config, self.log, self.step)


def build(inputs: Inputs, checkpoints: Sequence[Path] = (), *, older: bool = False) -> Training:
    """Start the process groups, build the policy and load its weights. Collective.

    The run folder is modified last, after everything else has succeeded.

    Args:
        inputs: result of :func:`~megatron_fspo.trainer.prepare.prepare`.
        checkpoints: checkpoints of the run, oldest first; none for a new run. The newest is loaded.
        older: if the newest cannot be read, load the newest that can.
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
    rows, size, shuffle = digest_of(inputs.train), config.rollout.prompts, config.data.shuffle
    prompts = PromptCursor(sets, config.run.seed, size=size, shuffle=shuffle, rows=rows)
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
    """Return the hash of all weights of ``model.checkpoint``, which the first rank reads; None without LoRA.
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
    """Load the weights of a new run, or a checkpoint; return and raise the same as :func:`_load_newest`. Also
    raises ``InputError`` on every rank if the checkpoint's adapters have another base. Collective."""
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
            f"{checkpoints[-1]} has adapters for weights other than {config.model.checkpoint}, or the run "
            "has another lora.rank: resume with the model.checkpoint and lora.rank of the run's config.toml"
        )
    return state, damaged


def _load_newest(
    policy: Policy, checkpoints: Sequence[Path], *, older: bool
) -> tuple[dict[str, Any], list[str]]:
    """Load the newest checkpoint, or with ``older`` the newest that can be read; return its state, and the
    problems of newer ones, newest first. Raises ``InputError`` on every rank if it fails. Collective."""
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
        f"{problems[0]}. The checkpoint before it is {checkpoints[-2]}: use --resume auto to continue from it"
    )


def _open_folder(
    inputs: Inputs, step: int | None, checkpoints: Sequence[Path], damaged: Sequence[str]
) -> RunLog:
    """Open the log; the first rank also updates the run folder, and renames damaged checkpoints. ``step`` is
    that of the loaded checkpoint; None for a new run. ``damaged`` has the problems of the newest of the
    ``checkpoints``, newest first."""
    config = inputs.config
    if dist.get_rank() != 0:
        return RunLog(config, writer=False, resume_step=step)
    changes = config_changes(config)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(config, writer=True, resume_step=step)
    save_config(config, config.run_folder / "config.toml")
    for checkpoint, problem in zip(reversed(checkpoints), damaged, strict=False):
        log.say(f"{problem}. Renamed it to {put_aside(checkpoint).name}; continuing from the one before it")
    for note in config.loss.notes(
        steps=config.run.steps,
        updates=config.batch.mini_batches * config.batch.epochs,
        off_policy_updates=config.off_policy_updates,
        warmup_updates=config.optimizer.warmup_steps,
    ):
        log.warn_once(note, note)
    _prune(config, log, step or 0)  # a killed run may have left old checkpoints
    for change, effect in changes.items():
        log.say(f"config changed since the run began: {change}{effect}")
    for note in inputs.notes:
        log.say(note)
    return log


def _prune(config: Config, log: RunLog, step: int) -> None:
    """Remove old checkpoints, but keep the newest from before the current streak of steps without spread."""
    stays = remove_old_checkpoints(config, good_step=step - log.steps_without_spread())
    for path, problem in stays.items():
        log.warn_once(f"{path.name} stays", f"{path} cannot be removed ({problem}): remove it manually")


def load_model(inputs: Inputs, groups: ParallelGroups) -> Model:
    """Load ``model.checkpoint`` in the policy's layout, without gradients or optimizer. Collective."""
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
    """Return the client of the vLLM servers on the first rank, else None. Call this before building a model:
    servers on the trainer's GPUs release their memory. Collective.

    Raises:
        TrainingError: a server did not release its memory.
        InputError: a server cannot release it or, with ``trains``, does not support the run's training.
    """
    config, leader = inputs.config, None
    if config.rollout.engine != "vllm":
        return None
    if dist.get_rank() == 0:
        leader = connect(config.vllm, inputs.arch.vocab_size)
        needs = needs_of(config) if trains else Needs()
        leader.loop.run(settle(leader, needs, colocated=config.vllm.colocated))
    groups.control.meet("the servers to release their memory")
    return leader


def build_engine(inputs: Inputs, model: Model, servers: Leader | None, *others: Model) -> RolloutEngine:
    """Return the sampler that ``rollout.engine`` names, for this model. ``others`` are models to offload
    together with it; ``servers`` is the result of :func:`open_servers`."""
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
    """Return the log-probs [n - 1] of each sequence's tokens but the first, on the first rank. FP8 is off,
    because its noise could hide small differences of weights between trainer and server. Collective."""
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
