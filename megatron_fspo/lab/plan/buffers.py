"""Memory outside of an optimizer step: sampling, sending weights; and of servers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import Shape
from megatron_fspo.weights import Architecture
from megatron_fspo.weights.table import whole_model

BUCKET = 256 * 2**20
"""Of a weight update: the default of ``in_buckets`` in :mod:`megatron_fspo.rollout.client.weights`."""
_FP32 = 4


def kv_bytes(shape: Shape, *, rows: int, tokens: int) -> int:
    """KV cache of the embedded engine on a rank, which allocates it whole: every row as long as the longest.

    Context-parallel ranks hold the same rows.
    """
    layers = shape.arch.num_layers // shape.parallel.pipeline
    return 2 * layers * rows * tokens * shape.arch.kv_size // shape.parallel.tensor * shape.width


def decoding_bytes(shape: Shape, *, rows: int, prompts: int, prompt_tokens: int, tokens: int) -> float:
    """The most beside the cache: a layer's copy of it when rows leave, logits of a step, or the prompts.

    Args:
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
class Server:
    """A vLLM server, GPU by GPU: from reading vLLM, not measured."""

    gpus: int
    """Tensor parallel."""
    weights: float
    receiving: float
    """Of a weight update: the largest tensor, and a layer that is put together anew."""
    cache: float
    """Room for keys and values."""
    cached_tokens: int
    """That fit there, over all its GPUs."""
    wanted_tokens: int
    """Of all responses that are asked of it at a time, with their prompts, at their longest."""


def server(
    arch: Architecture, *, width: int, gpus: int, memory: float, used: float, in_flight: int, tokens: int
) -> Server:
    """What a server has room for.

    Args:
        width: bytes of a weight, and of a cached value.
        memory: of a GPU; ``used`` is vLLM's share of it (``--gpu-memory-utilization``).
        in_flight: responses at a time, each of up to ``tokens`` with its prompt.
    """
    table = arch.vocab_size * arch.hidden_size * width
    weights = model_values(arch) * width / gpus
    layer = (model_values(arch) * width - (1 if arch.tied else 2) * table) / arch.num_layers / gpus
    receiving = table + layer
    cache = max(0.0, memory * used - weights - receiving)
    # Heads that are fewer than GPUs are kept more than once.
    heads = max(1, arch.num_kv_heads // gpus)
    token = 2 * arch.num_layers * heads * arch.head_dim * width
    return Server(
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
