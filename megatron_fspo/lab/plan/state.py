"""Bytes on a rank outside of activations: parameters, gradients, optimizer; sampling; sending; checkpoints.

The state of training and its checkpoint are exact, as Megatron lays them out; servers are from reading vLLM.

With a distributed optimizer the values of a model chunk lie in one buffer, which data (and context) parallel
ranks share out in equal parts. Its padding is that of ``_ParamAndGradBuffer`` in megatron-core
(``distributed/param_and_grad_buffer.py``): parameters begin at multiples of 64 values, and a bucket, of which
each rank has an equal part, at a multiple of 128 and of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import Parameter, Shape, stage_parameters
from megatron_fspo.weights import Architecture
from megatron_fspo.weights.table import whole_model

BUCKET = 256 * 2**20
"""Bytes of a weight update: the default of ``in_buckets`` in :mod:`megatron_fspo.rollout.client.weights`."""
_FP32 = 4
_GRADIENT = 4  # fp32, summed in fp32
_MOMENTS = 8  # two of Adam's, in fp32
_MASTER = 4  # the fp32 copy, where parameters are rounded


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that a rank holds all the time."""

    parameters: int
    gradients: int
    optimizer: int
    """Adam's moments and, in bf16, fp32 masters; a counter per parameter, 4 bytes, is left out."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Parameters whose gradients are reduced together."""

    size: int
    """Values, padding included."""
    spans: tuple[tuple[int, int], ...]
    """First and end of each parameter."""
    buckets: tuple[tuple[int, int], ...]
    ranks: int
    """Ranks that share it out."""

    def held(self, rank: int) -> int:
        """Values, without padding, that are a rank's under a distributed optimizer."""
        values = 0
        for start, end in self.buckets:
            size = (end - start) // self.ranks
            mine = (start + rank * size, start + (rank + 1) * size)
            values += sum(max(0, min(end, mine[1]) - max(first, mine[0])) for first, end in self.spans)
        return values


def state(shape: Shape, stage: int, rank: int = 0) -> State:
    """The state of a rank of the stage.

    Args:
        shape: the model and its layout.
        stage: pipeline stage, from 0.
        rank: among the ranks that share the optimizer's state out; the first holds as much as any but for
            padding.
    """
    parameters = gradients = held = 0
    spread = shape.parallel.distributed_optimizer
    for number, chunk in enumerate(stage_parameters(shape, stage)):
        for buffer in buffers(shape, stage, number, chunk):
            parameters += buffer.size * shape.width
            gradients += buffer.size * _GRADIENT
            held += buffer.held(rank % buffer.ranks) if spread else buffer.size
    return State(parameters=parameters, gradients=gradients, optimizer=held * _optimizer_width(shape))


def buffers(shape: Shape, stage: int, number: int, chunk: Sequence[Parameter]) -> Iterator[Buffer]:
    """The buffers of a model chunk: one of what all tensor-parallel ranks share, and one of its experts."""
    bucket = None
    if shape.parallel.overlap_grad_reduce and stage == 0 and number == 0:
        bucket = max(40_000_000, 1_000_000 * shape.data)  # Megatron's default
    for expert, ranks in ((False, shape.reduced_over), (True, shape.experts_reduced_over)):
        if some := [parameter for parameter in chunk if parameter.expert is expert]:
            yield _buffer(some, ranks, bucket, padded=shape.parallel.distributed_optimizer)


def _buffer(parameters: Sequence[Parameter], ranks: int, bucket: int | None, *, padded: bool) -> Buffer:
    """Last parameters first, about as backward comes to them."""
    step, align = (math.lcm(ranks, 128), 64) if padded else (1, 1)
    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
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
    return Buffer(size=at, spans=tuple(spans), buckets=tuple(buckets), ranks=ranks)


def _optimizer_width(shape: Shape) -> int:
    return _MOMENTS + (_MASTER if shape.width < 4 else 0)


def checkpoint_bytes(shape: Shape) -> int:
    """Tensors of a checkpoint to resume from: weights, moments and, in bf16, masters, without copies.

    Beside them lies an index.
    """
    return _values(shape, padded=True) * (shape.width + _optimizer_width(shape))


def export_bytes(shape: Shape) -> int:
    """Tensors of the Hugging Face checkpoint."""
    return _values(shape, padded=False) * shape.width


def _values(shape: Shape, *, padded: bool) -> int:
    arch = shape.arch
    return sum(
        (shape.padded_vocab * arch.hidden_size if padded and row.layout == "vocab" else 0)
        or sum(math.prod(tensor.shape(arch)) for tensor in row.hf)
        for row, _, _ in whole_model(arch)
    )


def kv_bytes(shape: Shape, *, rows: int, tokens: int) -> int:
    """KV cache of the embedded engine on a rank, which allocates it whole: every row as long as the longest.

    Context-parallel ranks hold the same rows.
    """
    layers = shape.arch.num_layers // shape.parallel.pipeline
    return 2 * layers * rows * tokens * shape.arch.kv_size // shape.parallel.tensor * shape.width


def decoding_bytes(shape: Shape, *, rows: int, prompts: int, prompt_tokens: int, tokens: int) -> float:
    """The most beside the cache: a layer's copy of it when rows leave, logits of a step, or the prompts.

    Args:
        shape: the model and its layout.
        rows: decoded side by side.
        prompts: read side by side, once for all samples of a prompt.
        prompt_tokens: of the longest.
        tokens: of the longest row.
    """
    arch, tp = shape.arch, shape.parallel.tensor
    layer = 2 * rows * tokens * arch.kv_size / tp * shape.width
    logits = rows * shape.padded_vocab * (shape.width + _FP32)
    ffn = arch.experts.per_token * arch.experts.ffn_size if arch.experts else arch.ffn_size / tp
    reading = prompts * prompt_tokens * (3 * arch.hidden_size + 3 * ffn) * shape.width
    return max(layer, logits, reading)


def sending_bytes(shape: Shape) -> int:
    """The most that the first rank holds of a weight update: a bucket, and the parameter that comes next, in
    parts from the tensor-parallel ranks and whole."""
    arch, width = shape.arch, shape.width
    most = held = 0
    for row, _, _ in whole_model(arch):
        sizes = [math.prod(tensor.shape(arch)) * width for tensor in row.hf]
        for size in sizes:
            # One rank's part is the parameter itself; q, k and v are put together anew all the same.
            parts = sum(sizes) if shape.parallel.tensor > 1 else 0
            whole = sum(sizes) if shape.parallel.tensor > 1 or row.layout == "qkv" else 0
            most = max(most, held + parts + whole)
            held = size if held and held + size > BUCKET else held + size
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


def server(
    arch: Architecture, *, width: int, gpus: int, memory: float, used: float, in_flight: int, tokens: int
) -> ServerMemory:
    """A server and what it has room for.

    Args:
        arch: the model.
        width: bytes of a weight, and of a cached value.
        gpus: of one server.
        memory: of a GPU; ``used`` is vLLM's share of it (``--gpu-memory-utilization``).
        used: vLLM's share of a GPU's memory (``--gpu-memory-utilization``).
        in_flight: responses at a time, each of up to ``tokens`` with its prompt.
        tokens: of a response with its prompt, at most.
    """
    table = arch.vocab_size * arch.hidden_size * width
    weights = model_values(arch) * width / gpus
    layer = (model_values(arch) * width - (1 if arch.tied else 2) * table) / arch.num_layers / gpus
    receiving = table + layer
    cache = max(0.0, memory * used - weights - receiving)
    # Heads that are fewer than GPUs are kept more than once.
    heads = max(1, arch.num_kv_heads // gpus)
    token = 2 * arch.num_layers * heads * arch.head_dim * width
    return ServerMemory(
        gpus=gpus,
        weights=weights,
        receiving=receiving,
        cache=cache,
        cached_tokens=int(cache / token),
        wanted_tokens=in_flight * tokens,
    )


def server_gpus(arch: Architecture, *, width: int, memory: float) -> int:
    """The smallest power of two of GPUs that holds the weights in half of their memory."""
    gpus = 1
    while model_values(arch) * width > gpus * memory / 2:
        gpus *= 2
    return gpus


def model_values(arch: Architecture) -> int:
    """Parameters of the model."""
    return sum(math.prod(t.shape(arch)) for row, _, _ in whole_model(arch) for t in row.hf)
