"""The plan of a run: memory by pipeline stage, servers, files, and time of a step by phase."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.activations import activations
from megatron_fspo.lab.plan.shape import PlannedPack, Shape, stage_parameters
from megatron_fspo.lab.plan.speed import Machine, Phase, Work, sampling, scoring, sending, updating
from megatron_fspo.lab.plan.state import (
    ServerMemory,
    cached_values,
    checkpoint_bytes,
    communicators,
    kv_bytes,
    model_values,
    sending_bytes,
    server_gpus,
    state,
    state_bytes,
    within_window,
)
from megatron_fspo.mcore.machine.sizes import check_parallel, check_world, make_adapters, shares_prompts
from megatron_fspo.packing.batch import route_dtype
from megatron_fspo.packing.zigzag import padded_length
from megatron_fspo.weights import Architecture

GIB = 2**30
ALONE_GIB = 0.39
ROUTES = "experts of each token, from the old pass"


@dataclass(frozen=True, kw_only=True)
class Given:
    """The assumptions of a plan that are not in the configuration."""

    world: int
    """Number of training ranks."""
    gpu_gib: float = 80.0
    reserve_gib: float = 4.0
    """GiB of a GPU reserved. CUDA took 0.6 GiB on an H200; the rest, for workspaces and fragmentation, is a
    guess."""
    communicator_gib: float = 1.25
    """GiB of a GPU for one of NCCL's communicators between GPUs; one of a single rank took ``ALONE_GIB`` on
    an H200. Eight H100s had 7 to 9.5 GB for a trainer's idle ones (verl#6408)."""
    mean_prompt: float | None = None
    """Mean tokens of a prompt; by default half of the limit."""
    mean_response: float | None = None
    servers: int | None = None
    """Number of vLLM servers; by default those in ``vllm.urls``, or 1 with ``vllm.discovery``."""
    server_gpus: int | None = None
    """GPUs per vLLM server, tensor parallel; by default, half of their memory holds the weights."""
    server_share: float = 0.9
    """Share of a server's GPU memory that vLLM uses."""
    machine: Machine = field(default_factory=Machine)

    @property
    def room(self) -> float:
        """Bytes of a GPU available to a rank."""
        return (self.gpu_gib - self.reserve_gib) * GIB


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Memory of a rank of a pipeline stage; on the first stage, of rank 0."""

    number: int
    always: dict[str, float]
    """Bytes held permanently."""
    phases: dict[str, dict[str, float]]
    """Phase of a step → additional bytes. Phases do not overlap."""
    nccl: float
    """Bytes of NCCL's communicators."""
    uneven: float = 0.0
    """Additional bytes of an update in which the rank's experts get twice their share of tokens."""

    @property
    def total(self) -> float:
        most = max(sum(parts.values()) for parts in self.phases.values())
        return sum(self.always.values()) + self.nccl + most

    @property
    def largest(self) -> str:
        """Name of the largest item of the total."""
        held = self.always | max(self.phases.values(), key=lambda parts: sum(parts.values()))
        return max(held, key=lambda name: held[name])


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run."""

    shape: Shape
    given: Given
    work: Work
    stages: list[Stage]
    server: ServerMemory | None
    checkpoint: int
    export: int
    phases: list[Phase]
    notes: list[str]
    memory_phases: dict[str, float]
    """Phase → bytes on a GPU shared by trainer and servers; empty if servers have their own GPUs."""

    @property
    def worst(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def problems(self) -> list[str]:
        """One line for each thing that does not fit."""
        problems, worst, room = [], self.worst, f"{self.given.room / GIB:.1f}"
        if worst.total > self.given.room:
            problems.append(
                f"stage {worst.number} needs {worst.total / GIB:.1f} of {room} GiB, most of it for "
                f"{worst.largest}"
            )
        problems += [
            f"memory phase {phase!r} needs {held / GIB:.1f} of {room} GiB: lower --server-share, raise "
            "--server-gpus, or split the model over more ranks"
            for phase, held in self.memory_phases.items()
            if held > self.given.room
        ]
        longest = within_window(self.shape.arch, self.work.pack.lengths[0])
        if self.server is not None and self.server.cached_tokens < longest:
            problems.append(
                f"the KV cache of a server with {self.server.gpus} GPUs holds {self.server.cached_tokens} "
                "tokens, fewer than one sequence: raise --server-gpus"
            )
        return problems

    @property
    def seconds(self) -> float:
        rollout, *training, sync = (phase.seconds for phase in self.phases)
        return (max if self.work.ahead else sum)((rollout, sum(training))) + sync


def make_plan(config: Config, arch: Architecture, given: Given) -> RunPlan:
    """Return the plan of a run.

    Raises:
        InputError: the layout does not fit the model or the number of ranks, there are fewer prompts than
            data-parallel ranks, or servers are given for the embedded engine.
    """
    check_world(config.parallel, given.world)
    check_parallel(arch, config.parallel)
    arch = replace(arch, adapters=make_adapters(config.lora, arch))
    shape = _shape(config, arch, given.world)
    if config.rollout.prompts < shape.data:
        raise InputError(
            f"rollout.prompts = {config.rollout.prompts} is less than the {shape.data} data-parallel ranks"
        )
    vllm = config.rollout.engine == "vllm"
    if given.servers is not None and not vllm:
        raise InputError(f"--servers {given.servers}: rollout.engine = embedded uses no servers")
    servers = _server(config, shape, given) if vllm else None
    work = _work(config, shape, given, servers)
    several, alone = communicators(shape)
    nccl = (several * given.communicator_gib + alone * ALONE_GIB) * GIB
    stages = [_stage(config, shape, work, stage, nccl) for stage in range(config.parallel.pipeline)]
    memory_phases = {}
    if servers is not None and config.vllm.colocated:
        # Those of ``rollout.client.memory_phases`` other than the trainer's.
        weights = max(stage.always["parameters"] for stage in stages)
        memory_phases["update"] = nccl + weights + sending_bytes(shape) + servers.weights + servers.receiving
        memory_phases["servers"] = nccl + given.server_share * given.gpu_gib * GIB
    return RunPlan(
        shape=shape,
        given=given,
        work=work,
        stages=stages,
        server=servers,
        checkpoint=checkpoint_bytes(shape),
        export=model_values(arch) * shape.width,
        phases=[
            *([] if config.supervised else [sampling(shape, work, given.machine)]),
            scoring(shape, work, given.machine),
            updating(shape, work, given.machine),
            sending(shape, given.machine, config.vllm.transfer if vllm else None),
        ],
        notes=_notes(config, shape, given, stages),
        memory_phases=memory_phases,
    )


def _shape(config: Config, arch: Architecture, world: int) -> Shape:
    """Return the run's shape, with GPUs and Transformer Engine unless the configuration excludes them."""
    device = "cpu" if config.model.backend == "cpu" else "cuda"
    local = device == "cpu" or config.model.layers == "local"
    kernels = device == "cuda" and config.model.dtype == "bfloat16" and config.model.head != "torch"
    return Shape(
        arch=arch,
        parallel=config.parallel,
        world=world,
        dtype=getattr(torch, config.model.dtype),
        layers="local" if local else "transformer_engine",
        device=device,  # type: ignore[arg-type]
        recompute=config.model.recompute == "full",
        fp8=config.fp8.recipe != "none",
        kernels=kernels,
    )


def _work(config: Config, shape: Shape, given: Given, servers: ServerMemory | None) -> Work:
    """Return the work of a step. A pack is full of the longest sequences, if a rank has as many."""
    rollout, batch, context = config.rollout, config.batch, config.parallel.context
    responses = rollout.prompts * config.samples
    prompt, response = config.data.max_prompt_tokens, rollout.max_response_tokens
    mean_prompt = given.mean_prompt or prompt / 2
    mean_response = given.mean_response or response / 2
    longest = padded_length(prompt + response, context)
    mine = max(1, -(-responses // (batch.mini_batches * shape.data)))
    count, rest = divmod(batch.max_tokens, longest)
    rest -= rest % padded_length(1, context)
    lengths = (longest,) * min(count, mine) + ((rest,) if rest and mine > count else ())
    groups = -(-mine // config.samples)
    share = shares_prompts(config, shape.layers, shape.arch)
    scored = int(sum(lengths) / context * response / (prompt / (config.samples if share else 1) + response))
    mean = mine * (mean_prompt + mean_response) - (mine - groups if share else 0) * (mean_prompt - 1)
    # With a single optimizer step on the model's own samples, old and new log-probs are the same.
    same = rollout.engine == "embedded" and (batch.mini_batches * batch.epochs == 1 or config.supervised)
    if servers is None:
        # Pipeline stages decode one after the other, and context-parallel ranks decode the same rows.
        samplers, gpus, side_by_side = shape.data, shape.parallel.tensor, rollout.max_batch
    else:
        samplers = given.servers or (1 if config.vllm.discovery else len(config.vllm.urls))
        gpus, room = servers.gpus, servers.cached_tokens / within_window(shape.arch, prompt + response)
        side_by_side = max(1, min(config.vllm.in_flight, int(room)))
    return Work(
        responses=responses,
        prompts=rollout.prompts,
        shared=responses - rollout.prompts if share else 0,
        prompt_tokens=mean_prompt,
        response_tokens=mean_response,
        longest_response=response,
        mini_batches=batch.mini_batches,
        epochs=batch.epochs,
        scored_before=(rollout.old_log_probs == "recompute" and not same) + bool(config.loss.kl_coef),
        pack=PlannedPack(lengths=lengths, scored=scored),
        micro_batches=max(1, round(-(-mean // batch.max_tokens))),
        samplers=samplers,
        sampler_gpus=gpus,
        side_by_side=side_by_side,
        embedded=servers is None,
        ahead=rollout.max_staleness > 0,
    )


def _stage(config: Config, shape: Shape, work: Work, number: int, nccl: float) -> Stage:
    always: dict[str, float] = {**vars(state(shape, number))}
    values = [p for chunk in stage_parameters(shape, number) for p in chunk]
    if config.loss.kl_coef and not config.lora.rank:
        always["reference model"] = sum(p.count for p in values) * shape.width
    if shape.fp8:
        matrices = sum(p.count for p in values if "layers." in p.name and len(p.shape) == 2)
        always["FP8 copies of weights"] = 2 * matrices
    # The worst rollout: all responses have the maximum length.
    mine = -(-work.responses // (work.mini_batches * shape.data))
    worst = -(-mine // max(1, config.batch.max_tokens // work.pack.lengths[0]))
    kept = activations(shape, number, work.pack, worst)
    top = max(kept.moments, key=lambda name: kept.moments[name])
    plural = "" if kept.micro_batches == 1 else "es"
    phases: dict[str, dict[str, float]] = {
        "update": {
            f"activations of {kept.micro_batches:g} micro-batch{plural}": kept.held,
            f"on top: {top}": kept.moments[top],
        }
    }
    uneven = 0.0
    if (experts := shape.arch.experts) is not None:
        twice = replace(shape.arch, experts=replace(experts, per_token=2 * experts.per_token))
        busy = activations(replace(shape, arch=twice), number, work.pack, worst)
        uneven = busy.held + max(busy.moments.values()) - kept.held - kept.moments[top]
    if experts is not None and (work.scored_before > bool(config.loss.kl_coef) or config.moe.replay != "off"):
        # For each layer of the stage, held from the old pass to the end of the step. An optimizer step
        # adds the choices of its own routers, and a flag per token for a difference.
        tokens = mine * work.pack.lengths[0] / shape.parallel.context
        seen = tokens / (shape.parallel.tensor if shape.parallel.sequence else 1)
        chunks = range(config.parallel.virtual_pipeline)
        layers = sum(shape.kinds(number, chunk).get(True, 0) for chunk in chunks)
        routes = route_dtype(experts.count).itemsize * experts.per_token
        kept_routes = work.mini_batches * tokens * routes + seen * (routes + 1)
        phases["update"][ROUTES] = layers * kept_routes
    if config.rollout.engine == "embedded" and not config.supervised:
        rows = min(config.rollout.max_batch, -(-work.responses // shape.data))
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        cache = kv_bytes(shape, rows=rows, tokens=longest)
        decoding = _decoding(config, shape, rows, longest)
        phases["rollout"] = {f"KV cache of {rows} rows": cache, "on top: decoding": decoding}
    elif number == 0 and not config.supervised:
        phases["sync"] = {"weights on their way to the servers": sending_bytes(shape)}
    return Stage(number=number, always=always, phases=phases, nccl=nccl, uneven=uneven)


def _decoding(config: Config, shape: Shape, rows: int, longest: int) -> float:
    """Return the peak bytes besides the KV cache: one layer's cache, copied when finished rows are removed,
    the logits of a step, or the pass over the prompts, one row per prompt."""
    arch, tp = shape.arch, shape.parallel.tensor
    layer = rows * longest * cached_values(arch, embedded=True, gpus=tp) * shape.width
    logits = rows * shape.padded_vocab * (shape.width + 4)  # and in fp32
    ffn = arch.ffn_size / tp if arch.dense_layers else 0.0
    if arch.experts:
        ffn = max(ffn, arch.experts.per_token * arch.experts.ffn_size + arch.shared_ffn_size / tp)
    prompts = -(-rows // config.samples) * config.data.max_prompt_tokens
    return max(layer, logits, prompts * (3 * arch.hidden_size + 3 * ffn) * shape.width)


def _server(config: Config, shape: Shape, given: Given) -> ServerMemory:
    arch, width, memory = shape.arch, shape.width, given.gpu_gib * GIB
    gpus = given.server_gpus or server_gpus(arch, width=width, memory=memory)
    table = arch.vocab_size * arch.hidden_size * width
    values = model_values(arch) * width
    receiving = table + (values - (1 if arch.tied else 2) * table) / arch.num_layers / gpus
    cache = max(0.0, memory * given.server_share - values / gpus - receiving)
    cache = max(0.0, cache - config.vllm.in_flight * state_bytes(arch, width) / gpus)
    token = arch.softmax_layers * cached_values(arch, embedded=False, gpus=gpus) * width
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return ServerMemory(
        gpus=gpus,
        weights=values / gpus,
        receiving=receiving,
        cache=cache,
        cached_tokens=int(cache / max(token, 1)),
        wanted_tokens=config.vllm.in_flight * int(within_window(arch, longest)),
    )


def _notes(config: Config, shape: Shape, given: Given, stages: list[Stage]) -> list[str]:
    notes = []
    if config.rollout.engine == "vllm" and given.servers is None:
        counted = f"the number of vLLM servers is that of vllm.urls: {len(config.vllm.urls)}"
        if config.vllm.discovery:
            counted = "1 vLLM server is assumed, because vllm.discovery names none before the run"
        notes.append(f"{counted}; --servers N sets another number")
    if config.vllm.colocated:
        notes.append("the time of a step does not include copies between GPU and host at each memory phase")
    if shape.arch.experts is not None:
        more = max(stage.uneven for stage in stages) / GIB
        notes.append(
            "tokens are assumed to be spread evenly over experts; a rank whose experts get twice their share "
            f"needs {more:.1f} GiB more"
        )
    if shape.arch.adapters is not None:
        notes.append("activations of adapters are not counted")
    if shape.device == "cuda":
        notes.append("activations are checked with traces of simulated GPUs (--trace), and on one real GPU")
    return notes
