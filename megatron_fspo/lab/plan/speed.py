"""Time of a step by phase: estimates from FLOP/s and bandwidths that are assumed, none of them measured.

A phase takes the time of its arithmetic or of its memory traffic, whichever is longer, plus that of its
messages as if nothing hid them. Not in it: kernels that are short, imbalance of packs and experts, prompts of
other lengths, rewards, evaluation, checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import PlannedPack, Shape, between
from megatron_fspo.lab.plan.state import model_values, state


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds that a GPU is assumed to reach. The peaks are those of NVIDIA's datasheet of the H100 SXM 80GB
    and of a node with one 400 Gb/s adapter a GPU; the shares of them are guesses."""

    flops: float = 989e12
    """Dense bf16 FLOP/s of a GPU."""
    flops_share: float = 0.4
    """Share of it in the trainer's passes."""
    memory: float = 3.35e12
    """Bytes per second of a GPU's memory."""
    memory_share: float = 0.6
    links: float = 450e9
    """Bytes per second from a GPU to others of its node, one way."""
    links_share: float = 0.7
    network: float = 50e9
    """Bytes per second from a GPU to other nodes, one way."""
    network_share: float = 0.7
    node: int = 8
    """GPUs of a node."""
    host: float = 2e9
    """Bytes per second of a weight update through a CPU (gloo) or a shared disk."""
    decoding_seconds: float = 0.01
    """Seconds of a decoding step beside reading memory: launches, sampling, the scheduler."""

    def between(self, ranks: int) -> float:
        """Bytes per second within a group of neighbours of so many ranks."""
        inside = ranks <= self.node
        return self.links * self.links_share if inside else self.network * self.network_share


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step, in tokens."""

    responses: int
    prompts: int
    shared: int
    """How often a prompt but its last token is in a pack already: computed once for several responses."""
    prompt_tokens: float
    """Mean of a prompt, as is assumed."""
    response_tokens: float
    """Mean of a response, as is assumed."""
    longest_response: int
    mini_batches: int
    epochs: int
    scored_before: int
    """Passes without gradients over the rollout: old log-probs, and a reference."""
    pack: PlannedPack
    micro_batches: int
    """Micro-batches of a rank in an optimizer step."""
    samplers: int
    """Servers, or the copies of the training model."""
    sampler_gpus: int
    """GPUs of each, which share its weights."""
    side_by_side: int
    """Responses of each at a time."""

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts with each response."""
        return self.responses * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Seconds of a step, by what they go to."""

    name: str
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def forward_flops(shape: Shape, work: Work) -> tuple[float, float]:
    """FLOPs of one forward over a step: of the layers, causal attention in them, and of the head."""
    arch = shape.arch
    layers = 0.0
    for length, count in (
        (work.prompt_tokens + work.response_tokens, work.responses),
        (work.prompt_tokens - 1, -work.shared),
    ):
        # Attention is q·k and weights·v, 2 · L² / 2 products of a head's size each.
        layers += 2.0 * arch.num_layers * (arch.layer_size * length + arch.q_size * length**2) * count
    head = 2.0 * arch.vocab_size * arch.hidden_size * work.responses * work.response_tokens
    return layers, head


def scoring(shape: Shape, work: Work, machine: Machine) -> Phase:
    """Passes without gradients: old log-probs, and those of a reference."""
    layers, head = forward_flops(shape, work)
    seconds = (layers + head) / _rate(shape, machine)
    packs = work.micro_batches * work.mini_batches
    parts = {
        "arithmetic": seconds,
        "pipeline bubble": seconds * _bubble(shape, packs),
        "messages": packs * _messages(shape, work.pack, machine),
    }
    return Phase(name="old pass", parts={k: v * work.scored_before for k, v in parts.items()})


def updating(shape: Shape, work: Work, machine: Machine) -> Phase:
    """Plan all optimizer steps of a rollout: forward once, backward twice that, once more with recompute; the
    head computes its logits twice."""
    layers, head = forward_flops(shape, work)
    steps, passes = work.mini_batches * work.epochs, 4 if shape.recompute else 3
    seconds = work.epochs * (layers * passes + 4 * head) / _rate(shape, machine)
    held = state(shape, 0)
    # Data-parallel neighbours lie among the ranks of a stage.
    ranks = shape.world // shape.parallel.pipeline if shape.reduced_over > 1 else 1
    gradients = 2 * held.gradients * (1 - 1 / shape.reduced_over) / machine.between(ranks)
    # Gradients, moments and masters are read, all but the first written, and the weights.
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
    """A rollout. A decoding step reads all weights and the cache of its rows once; there are at least as many
    steps as the longest response has tokens."""
    arch, width = shape.arch, shape.width
    bandwidth = machine.memory * machine.memory_share * work.sampler_gpus
    flops = machine.flops * machine.flops_share * work.sampler_gpus
    each = work.responses / work.samplers
    rows = min(float(work.side_by_side), each)
    steps = max(each * work.response_tokens / max(rows, 1.0), float(work.longest_response))
    busy = each * work.response_tokens / steps  # rows at work in a step, on average
    token = 2 * arch.num_layers * arch.kv_size * width
    cached = token * busy * (work.prompt_tokens + work.response_tokens / 2)
    active = arch.num_layers * arch.layer_size + arch.vocab_size * arch.hidden_size
    read = min(model_values(arch), active * busy) * width
    memory = (read + cached) / bandwidth
    arithmetic = 2 * active * busy / flops
    return Phase(
        name="rollout",
        parts={
            "prompts": 2 * active * work.prompts * work.prompt_tokens / work.samplers / flops,
            "memory bandwidth" if memory >= arithmetic else "arithmetic": steps * max(memory, arithmetic),
            "decoding steps": steps * machine.decoding_seconds,
        },
    )


def sending(shape: Shape, machine: Machine, transfer: str | None) -> Phase:
    """Weights to the servers, from the first rank; nothing where there are none."""
    if transfer is None:
        return Phase(name="sync", parts={"nothing to send": 0.0})
    size = model_values(shape.arch) * shape.width
    # Experts come from expert-parallel ranks, and hardly anything else is in such a model.
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
    """FLOP/s of all ranks."""
    return shape.world * machine.flops * machine.flops_share * (2 if shape.fp8 else 1)


def _bubble(shape: Shape, micro_batches: int) -> float:
    return (shape.parallel.pipeline - 1) / (micro_batches * shape.parallel.virtual_pipeline)


def _messages(shape: Shape, pack: PlannedPack, machine: Machine) -> float:
    """Seconds of one forward over a micro-batch on a rank: tensor, context and expert parallel."""
    arch, parallel, width = shape.arch, shape.parallel, shape.width
    tensor, context = parallel.tensor, parallel.context
    t = pack.tokens / context
    # Two all-reduces a layer, or as many gathers and scatters.
    seconds = 4 * t * arch.hidden_size * width * (1 - 1 / tensor) / machine.between(tensor)
    rings = 2 * t * arch.kv_size / tensor * width * (context - 1)
    seconds += rings / machine.between(tensor * context)
    if arch.experts is not None and parallel.expert > 1:
        sent = 2 * between(shape, pack) * arch.experts.per_token * arch.hidden_size * width
        seconds += sent * (1 - 1 / parallel.expert) / machine.between(parallel.expert)
    return arch.num_layers / parallel.pipeline * seconds
