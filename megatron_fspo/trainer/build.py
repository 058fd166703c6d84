"""Builds the objects of a new or resumed run from its checked inputs; evaluation uses some of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.config.loading import config_changes, save_config
from megatron_fspo.data.cursor import PromptCursor, digest_prompts, mixture
from megatron_fspo.errors import InputError
from megatron_fspo.job.resume import put_aside
from megatron_fspo.mcore.machine.startup import connect_groups, start
from megatron_fspo.mcore.model.lora import share_lost_by_merging
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.passes.fp8 import probe_fp8, without_fp8
from megatron_fspo.mcore.passes.score import score_sequences
from megatron_fspo.mcore.state.checkpoint import load_checkpoint
from megatron_fspo.mcore.state.hf_weights import (
    base_tensors,
    export_adapters,
    export_hf,
    fill_adapters,
    hf_tensors,
    load_hf,
    scaled_adapter_tensors,
)
from megatron_fspo.mcore.state.offload import Offload
from megatron_fspo.parallel.groups import ParallelGroups, share
from megatron_fspo.record.log import RunLog
from megatron_fspo.rollout.client import proof
from megatron_fspo.rollout.client.connect import Needs, connect, settle
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
from megatron_fspo.rollout.demonstrations import Demonstrations
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs, loss_notes, make_needs
from megatron_fspo.trainer.rollout import make_layout
from megatron_fspo.trainer.sampling import RolloutQueue, make_grader
from megatron_fspo.trainer.teacher import TeacherServers
from megatron_fspo.trainer.training import State, Training, remove_old
from megatron_fspo.weights import read_adapters, read_architecture
from megatron_fspo.weights.folder import digest


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
    connect_groups(groups, config.parallel, inputs.backend.device)
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
    longest, rollouts = config.rollout.max_response_tokens, config.rollouts_after_warmup
    updates, size, base = config.off_policy_updates, config.rollout.prompts, _base(inputs)
    loss = config.loss.start(inputs.noise, longest=longest, updates=updates, rollouts=rollouts)
    sets, rows = mixture(inputs.train, config.data), digest_prompts(inputs.train)
    prompts = PromptCursor(sets, config.run.seed, size=size, shuffle=config.data.shuffle, rows=rows)
    state, damaged = _load(inputs, policy, base, checkpoints, older=older)
    if checkpoints:
        prompts.load_state_dict(state["cursor"])
        loss.load_state_dict(state["loss"])
    step, spikes = state["step"], state["spikes"]
    reference = _load_reference(inputs, groups)
    engine = build_engine(inputs, policy, servers, *([reference] if reference else []))
    engine.update_weights(step)
    teacher = TeacherServers(inputs) if config.teacher.urls and groups.is_replica_leader else None
    grader = make_grader(config, groups)
    log = _open_folder(inputs, step if checkpoints else None, checkpoints, damaged)
    groups.control.barrier("the first rank to open the records of the run")
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
        layout=make_layout(config, inputs.arch, groups, inputs.backend),
        teacher=teacher,
        queue=RolloutQueue(inputs, engine, groups, grader, prompts, step),
        log=log,
        state=State(
            step=step,
            loss=loss,
            norms=deque(spikes["norms"], maxlen=config.optimizer.skip_window),
            skips_in_a_row=spikes["in_a_row"],
            saved=step,
        ),
        resumed=bool(checkpoints),
        base=base,
        fp8_modules=probe_fp8(policy),
    )


def export(policy: Policy, config: Config, log: RunLog) -> None:
    """Write the policy to ``hf/`` in the run folder, and the adapters to ``adapter/``. Collective."""
    arch = policy.arch
    export_hf(policy, config.run_folder / "hf", source=config.model.checkpoint)
    if arch.adapters:
        export_adapters(policy, config.run_folder / "adapter", base=config.model.checkpoint)
        lost = share_lost_by_merging(policy.chunks, arch)
        kept = f"{config.run_folder}/adapter has the adapters in PEFT's format"
        log.say(f"{kept}. They are also merged into hf/, where rounding lost {lost:.1%} of their change")


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
    for note in loss_notes(config):
        log.warn_once(note, note)
    remove_old(config, log, step or 0)  # a killed run may have left old checkpoints
    for change, effect in changes.items():
        log.say(f"config changed since the run began: {change}{effect}")
    for note in inputs.notes:
        log.say(note)
    return log


def _load_reference(inputs: Inputs, groups: ParallelGroups) -> Model | None:
    """After the policy, load the reference of the KL penalty, if it is a separate model here. Collective."""
    config = inputs.config
    groups.control.barrier("the weights to be loaded")
    if config.teacher.checkpoint:
        return load_model(inputs, groups, config.teacher.checkpoint)
    here = config.loss.kl_coef and not (inputs.arch.adapters or config.teacher.urls)
    return load_model(inputs, groups) if here else None


def load_model(inputs: Inputs, groups: ParallelGroups, checkpoint: Path | None = None) -> Model:
    """Load a checkpoint, by default ``model.checkpoint``, in the policy's layout, without gradients or
    optimizer. Collective."""
    config = inputs.config
    model = Model(
        read_architecture(checkpoint) if checkpoint else replace(inputs.arch, adapters=None),
        inputs.backend,
        groups,
        parallel=config.parallel,
        dtype=inputs.dtype,
        fp8=config.fp8,
    )
    load_hf(model, checkpoint or config.model.checkpoint)
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
        needs = make_needs(config) if trains else Needs()
        leader.loop.run(settle(leader, needs, colocated=config.vllm.colocated))
    groups.control.barrier("the servers to release their memory")
    return leader


def build_engine(inputs: Inputs, model: Model, servers: Leader | None, *others: Model) -> RolloutEngine:
    """Return the sampler that ``rollout.engine`` names, for this model. ``others`` are models to offload
    together with it; ``servers`` is the result of :func:`open_servers`."""
    vocab_size, options = inputs.arch.vocab_size, inputs.config.vllm
    if inputs.config.supervised:
        return Demonstrations()
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
