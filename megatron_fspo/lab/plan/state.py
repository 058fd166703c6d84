"""Bytes on a rank other than activations, and sizes of checkpoints and vLLM servers.

Training state and checkpoints follow Megatron's layout exactly. Server memory comes from reading vLLM's code.

With a distributed optimizer, the values of a model chunk lie in one buffer, split evenly among the data- (and
context-) parallel ranks. It is padded like ``_ParamAndGradBuffer`` in megatron-core
(``distributed/param_and_grad_buffer.py``): parameters start at multiples of 64 values, and buckets, which are
split evenly among the ranks, at multiples of 128 and of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import Parameter, Shape, stage_parameters
from megatron_fspo.parallel.buckets import BUCKET_BYTES
from megatron_fspo.weights import Architecture, adapter_shapes
from megatron_fspo.weights.table import rows, whole_model

_FP32 = _GRADIENT = 4
_MOMENTS = 8  # Adam's two, fp32
_MASTER = 4  # fp32 copy of bf16 parameters
Span = tuple[int, int]  # first value, end


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that a rank holds permanently."""

    parameters: int
    gradients: int
    optimizer: int
    """Adam's moments and, in bf16, fp32 masters; without the 4-byte step counter of each parameter."""


def state(shape: Shape, stage: int, rank: int = 0) -> State:
    """Return the state of a rank in pipeline stage ``stage``, from 0. ``rank`` is its index among the ranks
    that share a distributed optimizer; no other holds more than the first, except for padding."""
    size = held = frozen = 0
    for number, chunk in enumerate(stage_parameters(shape, stage)):
        bucket = None
        if shape.parallel.overlap_grad_reduce and stage == number == 0:
            bucket = max(40_000_000, 1_000_000 * shape.data)  # Megatron's default
        # Megatron has one buffer for the experts and one for all other parameters.
        same_experts = shape.world // shape.parallel.pipeline // shape.parallel.expert
        for expert, ranks in ((False, shape.reduced_over), (True, same_experts)):
            frozen += sum(param.count for param in chunk if param.expert is expert and param.frozen)
            trained = [param for param in chunk if param.expert is expert and not param.frozen]
            spans, buckets = _buffer(trained, ranks, bucket, padded=shape.parallel.distributed_optimizer)
            whole = buckets[-1][1] if buckets else 0
            size += whole
            held += _part(spans, buckets, ranks, rank) if shape.parallel.distributed_optimizer else whole
    return State(
        parameters=(size + frozen) * shape.width,
        gradients=size * _GRADIENT,
        optimizer=held * _optimizer_width(shape),
    )


def _part(spans: Sequence[Span], buckets: Sequence[Span], ranks: int, rank: int) -> int:
    """Return the number of values, without padding, in a rank's share of a buffer."""
    values = 0
    for start, end in buckets:
        size = (end - start) // ranks
        mine = start + rank % ranks * size
        values += sum(max(0, min(last, mine + size) - max(first, mine)) for first, last in spans)
    return values


def _buffer(
    parameters: Sequence[Parameter], ranks: int, bucket: int | None, *, padded: bool
) -> tuple[list[Span], list[Span]]:
    """Lay out a gradient buffer, last parameter first, about the order of backward. Returns the span of each
    parameter, and the buckets with padding."""
    step, align = (math.lcm(ranks, 128), 64) if padded else (1, 1)
    spans: list[Span] = []
    buckets: list[Span] = []
    begin = at = 0
    fresh = True  # the bucket is empty

    def close() -> None:
        nonlocal begin, at, fresh
        at += -at % step
        buckets.append((begin, at))
        begin, fresh = at, True

    for parameter in reversed(parameters):
        at += -at % align
        # A bucket of its own, so that both stages split a tied embedding at the same values.
        alone = parameter.shared and padded
        if alone and not fresh:
            close()
        spans.append((at, at + parameter.count))
        at, fresh = at + parameter.count, False
        if alone or (bucket is not None and at - begin >= bucket):
            close()
    if not fresh:
        close()
    return spans, buckets


def _optimizer_width(shape: Shape) -> int:
    return _MOMENTS + (_MASTER if shape.width < 4 else 0)


def checkpoint_bytes(shape: Shape) -> int:
    """Return the bytes of the tensors in a training checkpoint, without its index: weights (or adapters
    instead), moments and, in bf16, masters."""
    arch = shape.arch
    if arch.adapters is not None:
        return sum(map(math.prod, adapter_shapes(arch).values())) * (shape.width + _optimizer_width(shape))
    padding = (1 if arch.tied else 2) * (shape.padded_vocab - arch.vocab_size) * arch.hidden_size
    return (model_values(arch) + padding) * (shape.width + _optimizer_width(shape))


def kv_bytes(shape: Shape, *, rows: int, tokens: int) -> int:
    """Return the bytes of the embedded engine's KV cache on a rank, allocated for ``rows`` responses of
    ``tokens`` tokens. Context-parallel ranks hold the same rows."""
    arch, stages = shape.arch, shape.parallel.pipeline
    values = cached_values(arch, embedded=True, gpus=shape.parallel.tensor)
    states = state_bytes(arch, shape.width) // shape.parallel.tensor
    return -(-(arch.softmax_layers * tokens * values * shape.width + states) * rows // stages)


def state_bytes(arch: Architecture, width: int) -> int:
    """Return the bytes that a sequence has in all linear layers, however long it is: memory in fp32, and the
    last channels of the convolutions."""
    if (net := arch.linear) is None:
        return 0
    tail = (2 * net.keys + net.values) * (net.conv - 1) * width
    return arch.count("linear") * (arch.state_size * _FP32 + tail)


def cached_values(arch: Architecture, *, embedded: bool, gpus: int) -> int:
    """Return the values of a token that each of ``gpus`` caches in a layer: keys and values of its heads
    (with fewer heads than GPUs, they are replicated). vLLM caches latent attention's common ones instead, on
    all GPUs."""
    if arch.latent and not embedded:
        return arch.latent.kv_down_size
    return max(1, arch.num_kv_heads // gpus) * (arch.head_dim + arch.value_size // arch.num_heads)


def within_window(arch: Architecture, tokens: float) -> float:
    """Return the last of ``tokens`` that a token attends to, which vLLM keeps in its cache: mean over the
    layers with softmax attention."""
    window = min(tokens, arch.window or tokens)
    return (arch.count("full") * tokens + arch.count("window") * window) / max(arch.softmax_layers, 1)


def sending_bytes(shape: Shape) -> int:
    """Return the peak bytes on the first rank during a weight update: a bucket that is sent, with its packed
    copy, the next one, and the following parameter, both as shards from the other ranks and assembled. What
    other experts and stages send comes packed, and stays while one of its tensors is in a bucket."""
    arch, width, parallel = shape.arch, shape.width, shape.parallel
    most = before = held = count = 0
    # Tensors of all experts of a layer fill up together.
    stacks = sum(math.prod(size) for row in rows(arch) if row.stacked for size in row.files(arch).values())
    for row, _, expert in whole_model(arch):
        if row.stacked and expert:
            continue  # as the first
        sizes = [math.prod(size) * width for size in row.files(arch).values()]
        # The shard of a single rank is the parameter itself, but q, k and v are always rearranged, and what
        # is one tensor in the files is joined.
        ranks = parallel.expert if row.in_expert else parallel.tensor
        copies = 2 if ranks > 1 else int(row.layout == "qkv" or len(sizes) < len(row.hf))
        for size in sizes:
            most = max(most, before + held + (stacks * width if row.stacked else copies * sum(sizes)))
            if held and held + size > BUCKET_BYTES:
                before, held, count = held * (2 if count > 1 else 1), 0, 0
            held, count = held + size, count + 1
    most = max(most, 2 * held)
    spread = max(parallel.pipeline, parallel.expert if arch.experts else 1) > 1
    return most + (2 * BUCKET_BYTES if spread and before else 0)


def communicators(shape: Shape) -> tuple[int, int]:
    """Return the number of NCCL's communicators that a training step uses, over several ranks and of a single
    one; see :func:`megatron_fspo.mcore.machine.startup.connect_groups`."""
    parallel, experts = shape.parallel, shape.arch.experts is not None
    ranks, context = shape.world // parallel.pipeline, parallel.context
    of_norm = shape.world if parallel.distributed_optimizer else parallel.tensor * parallel.pipeline
    used = [shape.world, parallel.tensor, context, ranks // parallel.tensor, parallel.pipeline, of_norm]
    used += [shape.data] * (context > 1) + [parallel.expert, ranks // parallel.expert] * experts
    # Beyond two ranks, Transformer Engine's ring of keys and values has one with either neighbour. Megatron
    # reduces experts, and sends the number of tokens along the pipeline, also where a rank is alone.
    several = sum(size > 1 for size in used) + 2 * (context > 2)
    return several, (parallel.pipeline == 1) + (experts and ranks == parallel.expert)


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Bytes on each GPU of a vLLM server. From reading vLLM's code, not measured."""

    gpus: int
    """Tensor-parallel size of the server."""
    weights: float
    receiving: float
    """For a weight update: the largest tensor, and a layer that vLLM reassembles."""
    cache: float
    """KV cache."""
    cached_tokens: int
    """Tokens that fit into the cache of all its GPUs together."""
    wanted_tokens: int
    """Tokens of all responses in flight at full length, with their prompts."""


def server_gpus(arch: Architecture, *, width: int, memory: float) -> int:
    """Return the smallest power of two of GPUs that hold the weights in half of their memory."""
    gpus = 1
    while model_values(arch) * width > gpus * memory / 2:
        gpus *= 2
    return gpus


def model_values(arch: Architecture) -> int:
    """Return the number of parameters of the model."""
    return sum(math.prod(t.shape(arch)) for row, _, _ in whole_model(arch) for t in row.hf)
