"""Estimates of the time of a step by phase, from assumed FLOP/s and bandwidths.

The time of a phase is its arithmetic or its memory traffic, whichever is longer, plus all of its messages,
without overlap. Short kernels, uneven packs and experts, varying prompt lengths, rewards, evaluation and
checkpoints are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import PlannedPack, Shape, between
from megatron_fspo.lab.plan.state import cached_values, model_values, state, state_bytes, within_window
from megatron_fspo.weights.flops import layer_flops


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Assumed speeds of a GPU. The peaks are from NVIDIA's datasheet of the H100 SXM 80GB and for a node with
    one 400 Gb/s adapter per GPU; the achieved shares of the peaks are guesses. *Measured* are those of one
    H200 (benchmarks/results/gpu_h200.md)."""

    flops: float = 989e12
    """Peak dense bf16 FLOP/s of a GPU."""
    flops_share: float = 0.4
    """Share of ``flops`` that the trainer's passes reach. Measured 0.58 without tensor parallelism."""
    experts_flops_share: float = 0.24
    """The same for a mixture of experts: 240 TFLOP/s of Megatron's own 30B-A3B (Megatron-LM#5728)."""
    fp8_speedup: float = 1.3
    """Of passes, against bf16. Measured 1.21 to 1.34, with the head in bf16."""
    memory: float = 3.35e12
    """Memory bandwidth of a GPU, bytes per second."""
    memory_share: float = 0.6
    links: float = 450e9
    """Bytes per second from a GPU to others in its node, one way."""
    links_share: float = 0.7
    network: float = 50e9
    """Bytes per second from a GPU to other nodes, one way."""
    network_share: float = 0.7
    node: int = 8
    """GPUs per node."""
    host: float = 2e9
    """Bytes per second of a weight update through CPUs (gloo) or a shared disk."""
    decoding_seconds: float = 0.01
    """Fixed seconds of a server's decoding step: kernel launches, sampling, scheduler."""
    embedded_layer_seconds: float = 0.0022
    """The same of the embedded sampler, per layer. Measured: 63 ms with 28 layers."""

    def between(self, ranks: int) -> float:
        """Return the bytes per second within a group of ``ranks`` consecutive ranks."""
        inside = ranks <= self.node
        return self.links * self.links_share if inside else self.network * self.network_share


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a training step."""

    responses: int
    prompts: int
    shared: int
    """Responses that reuse the prompt of another response in the pack, except for its last token."""
    prompt_tokens: float
    """Assumed mean length of a prompt."""
    response_tokens: float
    """Assumed mean length of a response."""
    longest_response: int
    mini_batches: int
    epochs: int
    scored_before: int
    """Passes over the rollout without gradients: old log-probs and reference log-probs."""
    pack: PlannedPack
    micro_batches: int
    """Micro-batches per rank and optimizer step."""
    samplers: int
    """Number of vLLM servers or, with the embedded engine, of copies of the model."""
    sampler_gpus: int
    """GPUs per sampler, among which its weights are split."""
    side_by_side: int
    """Responses that a sampler decodes at a time."""
    embedded: bool
    """True if the trainer samples."""
    ahead: bool
    """True if servers sample the next rollout while the trainer trains."""

    @property
    def tokens(self) -> float:
        """Tokens of a step, with the prompt counted for each response."""
        return self.responses * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a step; ``parts`` are its seconds by cause."""

    name: str
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def forward_flops(shape: Shape, work: Work) -> tuple[float, float]:
    """Return the FLOPs of the layers and of the head in one forward pass over a step's responses."""
    arch, prompt = shape.arch, work.prompt_tokens
    layers = work.responses * layer_flops(arch, prompt + work.response_tokens)
    layers -= work.shared * layer_flops(arch, prompt - 1)
    head = 2.0 * arch.vocab_size * arch.hidden_size * work.responses * work.response_tokens
    return layers, head


def scoring(shape: Shape, work: Work, machine: Machine) -> Phase:
    """Plan the passes without gradients: old log-probs and reference log-probs."""
    layers, head = forward_flops(shape, work)
    seconds = (layers + head) / _rate(shape, machine)
    micro_batches = work.micro_batches * work.mini_batches
    parts = {
        "arithmetic": seconds,
        "pipeline bubble": seconds * _bubble(shape, micro_batches),
        "messages": micro_batches * _messages(shape, work.pack, machine),
    }
    return Phase(name="old pass", parts={k: v * work.scored_before for k, v in parts.items()})


def updating(shape: Shape, work: Work, machine: Machine) -> Phase:
    """Plan all optimizer steps of a rollout. Backward costs twice a forward pass, full recompute one more.
    The head computes its logits twice."""
    layers, head = forward_flops(shape, work)
    steps, passes = work.mini_batches * work.epochs, 4 if shape.recompute else 3
    seconds = work.epochs * (layers * passes + 4 * head) / _rate(shape, machine)
    held = state(shape, 0)
    # Data-parallel ranks lie within the ranks of a stage.
    ranks = shape.world // shape.parallel.pipeline if shape.reduced_over > 1 else 1
    gradients = 2 * held.gradients * (1 - 1 / shape.reduced_over) / machine.between(ranks)
    # Reads gradients, moments and fp32 masters; writes moments, masters and weights.
    adam = (held.gradients + 2 * held.optimizer + held.parameters) / (machine.memory * machine.memory_share)
    messages = work.micro_batches * (passes - 1) * _messages(shape, work.pack, machine)
    return Phase(
        name="update",
        parts={
            "arithmetic": seconds,
            "pipeline bubble": seconds * _bubble(shape, work.micro_batches),
            "messages": steps * messages,
            "gradient reduction": steps * gradients,
            "optimizer": steps * adam,
        },
    )


def sampling(shape: Shape, work: Work, machine: Machine) -> Phase:
    """Plan a rollout. A decoding step reads the weights and the KV cache of its responses once; the number of
    steps is at least the length of the longest response."""
    arch, width = shape.arch, shape.width
    bandwidth = machine.memory * machine.memory_share * work.sampler_gpus
    flops = machine.flops * machine.flops_share * work.sampler_gpus
    each = work.responses / work.samplers
    rows = min(float(work.side_by_side), each)
    steps = max(each * work.response_tokens / max(rows, 1.0), float(work.longest_response))
    busy = each * work.response_tokens / steps  # mean number of responses in a step
    cache = cached_values(arch, embedded=work.embedded, gpus=work.sampler_gpus) * work.sampler_gpus
    mean = within_window(arch, work.prompt_tokens + work.response_tokens / 2)
    cached = (arch.softmax_layers * cache * mean * width + 2 * state_bytes(arch, width)) * busy
    active = arch.num_layers * arch.layer_size + arch.vocab_size * arch.hidden_size
    read = min(model_values(arch), active * busy) * width
    memory = (read + cached) / bandwidth
    arithmetic = 2 * active * busy / flops
    return Phase(
        name="rollout",
        parts={
            "prompts": 2 * active * work.prompts * work.prompt_tokens / work.samplers / flops,
            "memory bandwidth" if memory >= arithmetic else "arithmetic": steps * max(memory, arithmetic),
            "decoding steps": steps * fixed_seconds(shape, work, machine),
        },
    )


def share_of_peak(shape: Shape, machine: Machine) -> float:
    """Return the share of ``machine.flops`` that the trainer's passes are assumed to reach."""
    return machine.flops_share if shape.arch.experts is None else machine.experts_flops_share


def fixed_seconds(shape: Shape, work: Work, machine: Machine) -> float:
    """Return the seconds of a decoding step that do not depend on its size."""
    if work.embedded:
        return shape.arch.num_layers * machine.embedded_layer_seconds
    return machine.decoding_seconds


def sending(shape: Shape, machine: Machine, transfer: str | None) -> Phase:
    """Plan the weight update from the first rank to the servers; nothing to send for the embedded engine."""
    if transfer is None:
        return Phase(name="sync", parts={"nothing to send": 0.0})
    size = model_values(shape.arch) * shape.width
    # Nearly all weights of a mixture of experts are experts, gathered from expert-parallel ranks.
    ranks = shape.parallel.tensor if shape.arch.experts is None else shape.parallel.expert
    speed = machine.network * machine.network_share if transfer == "nccl" else machine.host
    return Phase(
        name="sync",
        parts={
            "gathering": size * (1 - 1 / ranks) / machine.between(ranks)
            + size * (1 - 1 / shape.parallel.pipeline) / machine.between(shape.world),
            f"to the servers ({transfer})": size / speed,
        },
    )


def _rate(shape: Shape, machine: Machine) -> float:
    """Return the FLOP/s of all ranks together."""
    speedup = machine.fp8_speedup if shape.fp8 else 1
    return shape.world * machine.flops * share_of_peak(shape, machine) * speedup


def _bubble(shape: Shape, micro_batches: int) -> float:
    return (shape.parallel.pipeline - 1) / (micro_batches * shape.parallel.virtual_pipeline)


def _messages(shape: Shape, pack: PlannedPack, machine: Machine) -> float:
    """Return the seconds of a rank's messages within layers, in one forward pass over a micro-batch."""
    arch, parallel, width = shape.arch, shape.parallel, shape.width
    tensor, context = parallel.tensor, parallel.context
    t = pack.tokens / context
    # Two all-reduces per layer, or as many all-gathers and reduce-scatters.
    seconds = 4 * t * arch.hidden_size * width * (1 - 1 / tensor) / machine.between(tensor)
    rings = t * cached_values(arch, embedded=True, gpus=tensor) * width * (context - 1)
    seconds += rings / machine.between(tensor * context)
    if arch.experts is not None and parallel.expert > 1:
        sent = 2 * between(shape, pack) * arch.experts.per_token * arch.hidden_size * width
        share = 1 - arch.dense_layers / arch.num_layers  # of layers with experts
        seconds += share * sent * (1 - 1 / parallel.expert) / machine.between(parallel.expert)
    return arch.num_layers / parallel.pipeline * seconds
