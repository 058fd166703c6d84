"""A run on paper: memory by pipeline stage, servers, files, and time of a step by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.activations import activations
from megatron_fspo.lab.plan.shape import PlannedPack, Shape, stage_parameters
from megatron_fspo.lab.plan.speed import Machine, Phase, Samplers, Work, sampling, scoring, sending, updating
from megatron_fspo.lab.plan.state import (
    ServerMemory,
    checkpoint_bytes,
    decoding_bytes,
    export_bytes,
    kv_bytes,
    sending_bytes,
    server,
    server_gpus,
    state,
)
from megatron_fspo.mcore.sizes import check_parallel, check_world
from megatron_fspo.packing.batch import padded_length
from megatron_fspo.weights import Architecture

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Given:
    """The assumptions of a plan beside the configuration."""

    world: int
    """Ranks that train."""
    gpu_gib: float = 80.0
    reserve_gib: float = 6.0
    """GiB of a GPU for CUDA's context, NCCL, workspaces, and the allocator's fragments. A guess."""
    mean_prompt: float | None = None
    """Tokens; half of the longest where nobody says."""
    mean_response: float | None = None
    servers: int | None = None
    """vLLM servers; by default as many as ``vllm.urls`` names, one with ``vllm.discovery``."""
    server_gpus: int | None = None
    """GPUs of one vLLM server, tensor parallel; by default, half of their memory holds the weights."""
    server_share: float = 0.9
    """Share of a server's GPU that vLLM takes."""
    machine: Machine = field(default_factory=Machine)

    @property
    def room(self) -> float:
        """Bytes of a GPU that a rank may use."""
        return (self.gpu_gib - self.reserve_gib) * GIB


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Memory of a rank of a pipeline stage; of rank 0 on the first."""

    number: int
    always: dict[str, float]
    """Held from start to end."""
    phases: dict[str, dict[str, float]]
    """Phase of a step → bytes that it has beside; only one phase at a time is there."""

    @property
    def total(self) -> float:
        return sum(self.always.values()) + max(sum(parts.values()) for parts in self.phases.values())

    @property
    def largest(self) -> str:
        """Name of the largest part of the total."""
        worst = max(self.phases.values(), key=lambda parts: sum(parts.values()))
        held = self.always | worst
        return max(held, key=lambda name: held[name])


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run on paper."""

    shape: Shape
    given: Given
    work: Work
    samplers: Samplers
    stages: list[Stage]
    server: ServerMemory | None
    checkpoint: int
    export: int
    phases: list[Phase]
    notes: list[str]
    turns: dict[str, float]
    """Bytes of a GPU that trainer and servers share, by turn; empty where they have GPUs of their own."""

    @property
    def worst(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def problems(self) -> list[str]:
        """Everything that does not fit, a line each."""
        problems = []
        if self.worst.total > self.given.room:
            problems.append(
                f"stage {self.worst.number} needs {self.worst.total / GIB:.1f} GiB of "
                f"{self.given.room / GIB:.1f}; most of it: {self.worst.largest}"
            )
        for turn, held in self.turns.items():
            if held > self.given.room:
                problems.append(
                    f"the turn of the {turn} needs {held / GIB:.1f} GiB of {self.given.room / GIB:.1f}: less "
                    "--server-share, or more --server-gpus or ranks that share the model"
                )
        longest = self.work.pack.lengths[0]
        if self.server is not None and self.server.cached_tokens < longest:
            problems.append(
                f"a server of {self.server.gpus} GPUs has room for the keys and values of "
                f"{self.server.cached_tokens} tokens, less than one response: more --server-gpus"
            )
        return problems

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def make_plan(config: Config, arch: Architecture, given: Given) -> RunPlan:
    """The plan of a run.

    Raises:
        InputError: the model cannot be spread like this, or not over so many ranks; or servers are counted
            in a run that has none.
    """
    check_world(config.parallel, given.world)
    check_parallel(arch, config.parallel)
    shape = shape_of(config, arch, given.world)
    if config.rollout.prompts < shape.data:
        raise InputError(
            f"rollout.prompts = {config.rollout.prompts} is less than the {shape.data} data-parallel ranks"
        )
    work = work_of(config, shape, given)
    vllm = config.rollout.engine == "vllm"
    if given.servers is not None and not vllm:
        raise InputError(f"--servers {given.servers}: rollout.engine = embedded has none")
    servers = _server(config, shape, given) if vllm else None
    samplers = _samplers(config, shape, servers, given)
    stages = [_stage(config, shape, work, stage) for stage in range(config.parallel.pipeline)]
    return RunPlan(
        shape=shape,
        given=given,
        work=work,
        samplers=samplers,
        stages=stages,
        server=servers,
        checkpoint=checkpoint_bytes(shape),
        export=export_bytes(shape),
        phases=[
            sampling(shape, work, samplers, given.machine),
            scoring(shape, work, given.machine),
            updating(shape, work, given.machine),
            sending(shape, given.machine, config.vllm.transfer if vllm else None),
        ],
        notes=_notes(config, shape, given),
        turns=_turns(stages, shape, servers, given) if servers is not None and config.vllm.colocated else {},
    )


def shape_of(config: Config, arch: Architecture, world: int) -> Shape:
    """The run's shape; GPUs and Transformer Engine unless it says otherwise."""
    device = "cpu" if config.model.backend == "cpu" else "cuda"
    local = device == "cpu" or config.model.layers == "local"
    return Shape(
        arch=arch,
        parallel=config.parallel,
        world=world,
        dtype=getattr(torch, config.model.dtype),
        layers="local" if local else "transformer_engine",
        device=device,  # type: ignore[arg-type]
        recompute=config.model.recompute == "full",
        fp8=config.fp8.recipe != "none",
    )


def work_of(config: Config, shape: Shape, given: Given) -> Work:
    """The work of a step. Packs are of the longest sequences, as far as a rank has so many."""
    rollout, batch = config.rollout, config.batch
    context = config.parallel.context
    responses = rollout.prompts * rollout.samples
    prompt, response = config.data.max_prompt_tokens, rollout.max_response_tokens
    mean_prompt = given.mean_prompt or prompt / 2
    mean_response = given.mean_response or response / 2
    longest = padded_length(prompt + response, context)
    mine = max(1, -(-responses // (batch.mini_batches * shape.data)))
    count, rest = divmod(batch.max_tokens, longest)
    rest -= rest % padded_length(1, context)
    lengths = (longest,) * min(count, mine) + ((rest,) if rest and mine > count else ())
    mean = mine * (mean_prompt + mean_response)
    before = (rollout.old_log_probs == "recompute") + bool(config.loss.kl_coef)
    # Before a single optimizer step old and new log-probs are the same, of the model's own samples.
    if rollout.engine == "embedded" and batch.mini_batches * batch.epochs == 1:
        before -= rollout.old_log_probs == "recompute"
    return Work(
        responses=responses,
        prompts=rollout.prompts,
        prompt_tokens=mean_prompt,
        response_tokens=mean_response,
        longest_response=response,
        mini_batches=batch.mini_batches,
        epochs=batch.epochs,
        scored_before=before,
        pack=PlannedPack(
            lengths=lengths, scored=int(sum(lengths) / context * response / (prompt + response))
        ),
        micro_batches=max(1, round(-(-mean // batch.max_tokens))),
    )


def _stage(config: Config, shape: Shape, work: Work, number: int) -> Stage:
    held = state(shape, number)
    always: dict[str, float] = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
    }
    values = [p for chunk in stage_parameters(shape, number) for p in chunk]
    if config.loss.kl_coef:
        always["reference model"] = sum(p.count for p in values) * shape.width
    if shape.fp8:
        matrices = sum(p.count for p in values if "layers." in p.name and len(p.shape) == 2)
        always["FP8 copies of weights"] = 2 * matrices
    # The worst rollout, in which all responses are as long as they may be.
    mine = -(-work.responses // (work.mini_batches * shape.data))
    worst = -(-mine // max(1, config.batch.max_tokens // work.pack.lengths[0]))
    kept = activations(shape, number, work.pack, worst)
    top = max(kept.moments, key=lambda name: kept.moments[name])
    plural = "" if kept.micro_batches == 1 else "es"
    phases = {
        "update": {
            f"activations of {kept.micro_batches:g} micro-batch{plural}": kept.held,
            f"on top: {top}": kept.moments[top],
        }
    }
    if config.rollout.engine == "embedded":
        phases["rollout"] = _embedded(config, shape, work)
    elif number == 0:
        phases["sync"] = {"weights on their way to the servers": sending_bytes(shape)}
    return Stage(number=number, always=always, phases=phases)


def _embedded(config: Config, shape: Shape, work: Work) -> dict[str, float]:
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    mine = -(-work.responses // shape.data)
    rows = min(config.rollout.max_batch, mine)
    prompts = -(-rows // config.rollout.samples)
    return {
        f"KV cache of {rows} rows": kv_bytes(shape, rows=rows, tokens=tokens),
        "on top: decoding": decoding_bytes(
            shape,
            rows=rows,
            prompts=prompts,
            prompt_tokens=config.data.max_prompt_tokens,
            tokens=tokens,
        ),
    }


def _server(config: Config, shape: Shape, given: Given) -> ServerMemory:
    gpus = given.server_gpus or server_gpus(shape.arch, width=shape.width, memory=given.gpu_gib * GIB)
    return server(
        shape.arch,
        width=shape.width,
        gpus=gpus,
        memory=given.gpu_gib * GIB,
        used=given.server_share,
        in_flight=config.vllm.in_flight,
        tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )


def _turns(stages: Sequence[Stage], shape: Shape, one: ServerMemory, given: Given) -> dict[str, float]:
    """Return the bytes of a GPU in the turns (``rollout.client.turns``) that are not the trainer's own."""
    weights = max(stage.always["parameters"] for stage in stages)
    return {
        "update": weights + sending_bytes(shape) + one.weights + one.receiving,
        "servers": given.server_share * given.gpu_gib * GIB,
    }


def _samplers(config: Config, shape: Shape, one: ServerMemory | None, given: Given) -> Samplers:
    if one is None:
        # Stages decode one after the other, and context-parallel ranks the same rows.
        rows = config.rollout.max_batch
        return Samplers(count=shape.data, gpus=shape.parallel.tensor, side_by_side=rows)
    longest = one.wanted_tokens // config.vllm.in_flight
    rows = max(1, min(config.vllm.in_flight, one.cached_tokens // longest))
    named = 1 if config.vllm.discovery else len(config.vllm.urls)
    return Samplers(count=given.servers or named, gpus=one.gpus, side_by_side=rows)


def _notes(config: Config, shape: Shape, given: Given) -> list[str]:
    notes = []
    if config.rollout.engine == "vllm" and given.servers is None:
        counted = (
            "1 vLLM server is assumed, since vllm.discovery names none before the run"
            if config.vllm.discovery
            else f"as many vLLM servers as vllm.urls names: {len(config.vllm.urls)}"
        )
        notes.append(f"{counted}; --servers N counts others")
    if config.vllm.colocated:
        notes.append("what moves between GPU and host from turn to turn is not in the time of a step")
    if shape.arch.experts is not None:
        notes.append("`train` refuses mixtures of experts so far; this is what one would take")
    if shape.layers == "transformer_engine":
        notes.append("activations of Transformer Engine are from reading its modules, not measured")
    return notes
