"""Bytes on a rank outside of activations: parameters, gradients, optimizer; sampling; sending; checkpoints.

The state of training and its checkpoint are exact, as Megatron lays them out; servers are from reading vLLM.

With a distributed optimizer the values of a model chunk lie in one buffer, which data (and context) parallel
ranks share out in equal parts. Its padding is that of ``_ParamAndGradBuffer`` in megatron-core
(``distributed/param_and_grad_buffer.py``): parameters begin at multiples of 64 values, and a bucket, of which
each rank has an equal part, at a multiple of 128 and of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import Parameter, Shape, stage_parameters
from megatron_fspo.weights import Architecture, adapter_shapes
from megatron_fspo.weights.table import whole_model

BUCKET = 256 * 2**20
"""Bytes of a weight update: the default of ``in_buckets`` in :mod:`megatron_fspo.rollout.client.weights`."""
_GRADIENT = 4  # fp32, summed in fp32
_MOMENTS = 8  # two of Adam's, in fp32
_MASTER = 4  # the fp32 copy, where parameters are rounded
Span = tuple[int, int]  # first value and end


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that a rank holds all the time."""

    parameters: int
    gradients: int
    optimizer: int
    """Adam's moments and, in bf16, fp32 masters; a counter per parameter, 4 bytes, is left out."""


def state(shape: Shape, stage: int, rank: int = 0) -> State:
    """The state of a rank of a pipeline stage, from 0. ``rank`` is its number among those that share the
    optimizer's state out; the first holds as much as any but for padding."""
    size = held = frozen = 0
    for number, chunk in enumerate(stage_parameters(shape, stage)):
        bucket = None
        if shape.parallel.overlap_grad_reduce and stage == number == 0:
            bucket = max(40_000_000, 1_000_000 * shape.data)  # Megatron's default
        # A buffer of what all tensor-parallel ranks share, and one of the experts.
        same_experts = shape.world // shape.parallel.pipeline // shape.parallel.expert
        for expert, ranks in ((False, shape.reduced_over), (True, same_experts)):
            frozen += sum(one.count for one in chunk if one.expert is expert and one.frozen)
            some = [one for one in chunk if one.expert is expert and not one.frozen]
            spans, buckets = _buffer(some, ranks, bucket, padded=shape.parallel.distributed_optimizer)
            whole = buckets[-1][1] if buckets else 0
            size += whole
            held += _part(spans, buckets, ranks, rank) if shape.parallel.distributed_optimizer else whole
    return State(
        parameters=(size + frozen) * shape.width,
        gradients=size * _GRADIENT,
        optimizer=held * _optimizer_width(shape),
    )


def _part(spans: Sequence[Span], buckets: Sequence[Span], ranks: int, rank: int) -> int:
    """Values, without padding, of a rank of those that share a buffer out."""
    values = 0
    for start, end in buckets:
        size = (end - start) // ranks
        mine = start + rank % ranks * size
        values += sum(max(0, min(last, mine + size) - max(first, mine)) for first, last in spans)
    return values


def _buffer(
    parameters: Sequence[Parameter], ranks: int, bucket: int | None, *, padded: bool
) -> tuple[list[Span], list[Span]]:
    """The parameters whose gradients are reduced together, the last first, about as backward comes to them:
    where each lies, and the buckets, padding included."""
    step, align = (math.lcm(ranks, 128), 64) if padded else (1, 1)
    spans: list[Span] = []
    buckets: list[Span] = []
    begin = at = 0
    fresh = True  # whether the bucket is empty

    def close() -> None:
        nonlocal begin, at, fresh
        at += -at % step
        buckets.append((begin, at))
        begin, fresh = at, True

    for parameter in reversed(parameters):
        at += -at % align
        # So that both stages of a tied embedding cut it at the same values.
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
    """Tensors of a checkpoint to resume from, without copies: weights, or adapters in their place, moments
    and, in bf16, masters.

    Beside them lies an index.
    """
    arch = shape.arch
    if arch.adapters is not None:
        return sum(map(math.prod, adapter_shapes(arch).values())) * (shape.width + _optimizer_width(shape))
    padding = (1 if arch.tied else 2) * (shape.padded_vocab - arch.vocab_size) * arch.hidden_size
    return (model_values(arch) + padding) * (shape.width + _optimizer_width(shape))


def kv_bytes(shape: Shape, *, rows: int, tokens: int) -> int:
    """KV cache of the embedded engine on a rank, which allocates it whole: every row as long as the longest.

    Context-parallel ranks hold the same rows.
    """
    layers = shape.arch.num_layers // shape.parallel.pipeline
    return 2 * layers * rows * tokens * shape.arch.kv_size // shape.parallel.tensor * shape.width


def sending_bytes(shape: Shape) -> int:
    """The most that the first rank holds of a weight update: a bucket on its way, the next, and the parameter
    after it, in parts from the tensor-parallel ranks, or an expert of another rank, and whole."""
    arch, width = shape.arch, shape.width
    most = before = held = 0
    for row, _, _ in whole_model(arch):
        sizes = [math.prod(tensor.shape(arch)) * width for tensor in row.hf]
        # One rank's part is the parameter itself; q, k and v are put together anew all the same.
        ranks = shape.parallel.expert if row.of_expert else shape.parallel.tensor
        copies = 2 if ranks > 1 else int(row.layout == "qkv")
        for size in sizes:
            most = max(most, before + held + copies * sum(sizes))
            if held and held + size > BUCKET:
                before, held = held, 0
            held += size
    return most


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """A vLLM server, GPU by GPU: from reading vLLM, not measured."""

    gpus: int
    """Tensor parallel."""
    weights: float
    receiving: float
    """A weight update: the largest tensor, and a layer that is put together anew."""
    cache: float
    """Room for keys and values."""
    cached_tokens: int
    """Tokens that fit there, over all its GPUs."""
    wanted_tokens: int
    """Tokens of all responses that are asked of it at a time, with their prompts, at their longest."""


def server_gpus(arch: Architecture, *, width: int, memory: float) -> int:
    """The smallest power of two of GPUs that holds the weights in half of their memory."""
    gpus = 1
    while model_values(arch) * width > gpus * memory / 2:
        gpus *= 2
    return gpus


def model_values(arch: Architecture) -> int:
    """Parameters of the model."""
    return sum(math.prod(t.shape(arch)) for row, _, _ in whole_model(arch) for t in row.hf)
