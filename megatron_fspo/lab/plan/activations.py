"""Activations: the tensors that a micro-batch leaves for backward, and the peak of an optimizer step.

Two columns. ``local`` is what our layers on Megatron's local specification save: on a CPU measured, by
``benchmarks/plan_memory.py`` and ``tests/plan``; on a GPU, where norms are single kernels, compared with
traces (``benchmarks/trace_layouts.py``). So is ``transformer_engine``: fused norm and product, fused RoPE and
SwiGLU, attention, which saves q, k, v, its output and a log-sum-exp per row. Experts are those of Megatron's
all-to-all dispatcher; their tokens are taken to be spread evenly over all ranks that share them. The log-prob
head has the chunks of :mod:`megatron_fspo.parallel.head`, or its kernels.

Packs differ; a plan takes a full one. Under full recompute a layer keeps its input alone, and one layer at a
time is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import PlannedPack, Shape, between
from megatron_fspo.parallel.head import BLOCK_LOGITS, CHUNK_TOKENS, GRADIENT_BYTES, KEEP_BYTES
from megatron_fspo.weights import has_parameter

_BATCH = 45
"""Bytes per token of a micro-batch itself: ids, positions, labels, mask, segment, log-probs."""
_FP32 = 4
_PER_ROW = 8 + 8 + 4 * _FP32  # of the head: index, label, m, Z, H and log p


@dataclass(frozen=True)
class KeptTensor:
    """A tensor, or several alike, that one layer keeps for backward: bytes by implementation of the layer."""

    what: str
    local: float
    transformer_engine: float


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one pipeline stage in backward."""

    held: float
    """Kept for the backward of all micro-batches that are under way."""
    micro_batches: float
    """Their number; those of virtual stages count by their share of the layers."""
    moments: dict[str, float]
    """Bytes on top of those, by what is being computed. They do not come together."""


def layer_tensors(shape: Shape, pack: PlannedPack) -> list[KeptTensor]:
    """The tensors that a layer keeps of one micro-batch without recompute."""
    return [*_attention(shape, pack), *_mlp(shape, pack)]


def layer_bytes(shape: Shape, pack: PlannedPack) -> float:
    """Their sum for the layers of ``shape``."""
    local = shape.layers == "local"
    return sum(tensor.local if local else tensor.transformer_engine for tensor in layer_tensors(shape, pack))


def _norm(shape: Shape, pack: PlannedPack, name: str) -> Iterator[KeptTensor]:
    """Tensors of a norm and the product behind it. On a CPU torch's norm computes in fp32 and keeps that; on
    a GPU it is one kernel."""
    tokens = between(shape, pack)
    hidden = tokens * shape.arch.hidden_size
    fused = shape.device == "cuda"
    yield KeptTensor(
        f"input of the {name} norm", hidden * (shape.width if fused else _FP32), hidden * shape.width
    )
    yield KeptTensor("its 1/rms", tokens * _FP32, tokens * _FP32)
    yield KeptTensor("its output before the weight", 0 if fused else hidden * _FP32, 0)
    yield KeptTensor("its output, into a product", hidden * shape.width, hidden * _product_width(shape))


def _attention(shape: Shape, pack: PlannedPack) -> Iterator[KeptTensor]:
    arch, tp, width = shape.arch, shape.parallel.tensor, shape.width
    context = shape.parallel.context
    t = pack.tokens / context
    q, kv, heads = arch.q_size / tp, arch.kv_size / tp, arch.num_heads / tp
    yield from _norm(shape, pack, "first")
    normed = has_parameter(arch, "self_attention.q_layernorm.weight")
    if normed:
        stats = t * (arch.num_heads + arch.num_kv_heads) / tp * _FP32
        # On a GPU the local norm keeps a view of the product; Transformer Engine's copies.
        fused = shape.device == "cuda"
        yield KeptTensor("q into its norm", 0 if fused else t * q * _FP32, t * q * width)
        yield KeptTensor("k into its norm", 0 if fused or width == _FP32 else t * kv * _FP32, t * kv * width)
        yield KeptTensor("1/rms of q and k", stats, stats)
        yield KeptTensor("q and k before the weight", 0 if fused else t * (q + kv) * _FP32, 0)
    # v is a view of it, which Transformer Engine copies. Locally, context parallel copies v; then only k's
    # norm may still look at it.
    viewed = context == 1 or (normed and (width == _FP32 or shape.device == "cuda"))
    product = t * (q + 2 * kv) * width
    yield KeptTensor("product q, k, v", product if viewed else 0, 0)
    yield KeptTensor("v, as attention takes it", 0, t * kv * width)
    yield KeptTensor("cos and sin of q and of k", 4 * t * arch.head_dim * width, 0)
    yield KeptTensor("q after RoPE", t * q * width, t * q * width)
    if context == 1:
        yield KeptTensor("k after RoPE", t * kv * width, t * kv * width)
    else:
        yield KeptTensor("k and v of all ranks", 2 * pack.tokens * kv * width, t * kv * width)
        masks = sum(length * length for length in pack.lengths) / context
        yield KeptTensor("masks", masks * width, 0)
    yield KeptTensor("log-sum-exp", t * heads * _FP32, t * heads * _FP32)
    yield KeptTensor("attention's output, by sequence", t * q * width, 0)
    yield KeptTensor("attention's output, into a product", t * q * width, t * q * width)


def _mlp(shape: Shape, pack: PlannedPack) -> Iterator[KeptTensor]:
    arch, width = shape.arch, shape.width
    yield from _norm(shape, pack, "second")
    if arch.experts is None:
        values = pack.tokens / shape.parallel.context * arch.ffn_size / shape.parallel.tensor
    else:
        values = _routed(shape, pack) * arch.experts.ffn_size
        scores = 2 * between(shape, pack) * arch.experts.count * _FP32
        yield KeptTensor("router's logits and probabilities", scores, scores)
        tokens = _routed(shape, pack) * arch.hidden_size * width
        yield KeptTensor("tokens at their experts", tokens, tokens)
    yield KeptTensor("gate and up", 2 * values * width, 2 * values * width)
    yield KeptTensor("silu(gate)", values * width, 0)
    yield KeptTensor("up, as the product takes it", values * width, 0)
    yield KeptTensor("silu(gate) · up, into a product", values * width, values * _product_width(shape))


def _routed(shape: Shape, pack: PlannedPack) -> float:
    """Tokens that experts of a rank get, each as often as it is sent to one."""
    assert shape.arch.experts is not None
    return between(shape, pack) * shape.arch.experts.per_token


def layer_input(shape: Shape, pack: PlannedPack) -> float:
    """Bytes that a layer keeps under full recompute."""
    return between(shape, pack) * shape.arch.hidden_size * shape.width


def layer_backward(shape: Shape, pack: PlannedPack) -> float:
    """The most that the backward of a layer adds to what the layer saved: gradients of activations and,
    locally, of one matrix. With experts its forward adds more."""
    arch, tp = shape.arch, shape.parallel.tensor
    t = pack.tokens / shape.parallel.context
    hidden = between(shape, pack) * arch.hidden_size
    if arch.experts is None:
        values, matrix = t * arch.ffn_size / tp, arch.hidden_size * arch.ffn_size / tp
        most = 2 * values  # of the activation
    else:
        values = _routed(shape, pack) * arch.experts.ffn_size
        matrix = arch.hidden_size * arch.experts.ffn_size
        # What was sent to the experts, what comes back of them, and the same sorted by sender.
        most = 3 * _routed(shape, pack) * arch.hidden_size
    if shape.layers == "local":
        most = max(most, values + matrix, t * arch.hidden_size + 2 * matrix - 3 * values)  # down, and up
    return (hidden + (t * arch.hidden_size if shape.parallel.sequence else 0) + most) * shape.width


def kept(shape: Shape, stage: int, chunk: int, pack: PlannedPack) -> float:
    """Bytes that one micro-batch keeps in a model chunk from its forward to its backward."""
    arch, width = shape.arch, shape.width
    hidden = layer_input(shape, pack)
    one = hidden if shape.recompute else layer_bytes(shape, pack)
    # Angles of positions, and the micro-batch.
    total = shape.chunk_layers * one + max(pack.lengths) * arch.head_dim * _FP32
    total += _BATCH * pack.tokens / shape.parallel.context
    # Megatron's schedule keeps what came from the stage before and what went to the next. In fp32, and under
    # recompute, the first is also what the first layer keeps.
    if (stage or chunk) and not (shape.recompute or width == _FP32):
        total += hidden
    if not shape.is_last(stage, chunk):
        return total + hidden
    # The last norm's.
    final = 2 * _FP32 / width * hidden if shape.layers == "local" and shape.device == "cpu" else hidden
    return total + final + _head_saved(shape, pack)


def in_flight(shape: Shape, stage: int, micro_batches: int) -> int:
    """Micro-batches (times virtual stages: chunks) of a stage that wait for their backward, at most."""
    stages, virtual = shape.parallel.pipeline, shape.parallel.virtual_pipeline
    if virtual == 1:
        return min(micro_batches, stages - stage)
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages
    return min(micro_batches * virtual, ahead + 1)


def activations(shape: Shape, stage: int, pack: PlannedPack, micro_batches: int) -> Activations:
    """The activations of an optimizer step of so many micro-batches, each like ``pack``, on one rank of a
    pipeline stage, from 0."""
    virtual = shape.parallel.virtual_pipeline
    chunks = [kept(shape, stage, chunk, pack) for chunk in range(virtual)]
    flying = in_flight(shape, stage, micro_batches)
    held = sum(chunks) * flying / virtual if flying % virtual else sum(chunks) * (flying // virtual)
    if shape.parallel.pipeline > 1:  # what came and what goes, forward and back
        held += 2 * layer_input(shape, pack)
    held += _gathered(shape, pack)  # a buffer, which Megatron keeps
    again = 0.0
    if shape.recompute:
        again = layer_bytes(shape, pack)
        # Its input is there already; locally its first norm keeps another one, in fp32. And its output.
        if shape.layers == "local" and shape.width < _FP32:
            again += layer_input(shape, pack)
    table = float(shape.vocab_rows * shape.arch.hidden_size * shape.width)
    tied = shape.arch.tied and shape.parallel.pipeline == 1
    moments = {"a layer's backward": again + layer_backward(shape, pack) + (table if tied else 0)}
    if shape.is_last(stage):
        # Megatron widens the last stage's output to fp32, which the head narrows again.
        widened = between(shape, pack) * shape.arch.hidden_size * _FP32 if shape.width < _FP32 else 0
        moments["the head's forward"] = widened + _gathered(shape, pack) + _chunk(shape, pack)
        moments["the head's backward"] = _head_backward(shape, pack)
        moments["a layer's backward"] -= _head_saved(shape, pack)
    if stage == 0:
        # All layers of one micro-batch are done by then. A tied table has two gradients, and their sum.
        gone = chunks[0] - layer_input(shape, pack) * (shape.parallel.pipeline > 1)
        moments["the embedding's backward"] = (3 if tied else 1) * table - gone + layer_input(shape, pack)
    return Activations(held=held, micro_batches=flying / virtual, moments=moments)


def _product_width(shape: Shape) -> int:
    """Bytes of a value that a product keeps: Transformer Engine keeps the FP8 one."""
    return 1 if shape.fp8 else shape.width


def _head_saved(shape: Shape, pack: PlannedPack) -> float:
    """Bytes that the log-prob head keeps of a micro-batch for backward: hidden states and a few values per
    row. What sequence parallel gathers is there only from its forward to its backward."""
    return layer_input(shape, pack) + _PER_ROW * pack.scored


def _gathered(shape: Shape, pack: PlannedPack) -> float:
    """Hidden states that sequence parallel gathers."""
    return layer_input(shape, pack) * shape.parallel.tensor if shape.parallel.sequence else 0


def _head_backward(shape: Shape, pack: PlannedPack) -> float:
    """The most in backward: the chunk of forward with the gradients of the rows, or what it ends with."""
    arch, width = shape.arch, shape.width
    rows = pack.scored * arch.hidden_size
    # On CUDA bf16 logits go into the products.
    narrowed = 2 * _logits(shape, pack) if shape.device == "cuda" and width < _FP32 else 0
    working = _chunk(shape, pack) + narrowed
    if shape.kernels:
        working = _chunk(shape, pack) + min(GRADIENT_BYTES, pack.scored * shape.vocab_rows * width)
    # Autograd gets zeros for the weight, whose gradient went to main_grad.
    zeros = shape.vocab_rows * arch.hidden_size * width
    whole = pack.tokens / shape.parallel.context * arch.hidden_size
    given = whole * width + (rows * width if width < _FP32 else 0)
    if shape.parallel.sequence:
        given = whole * _FP32 + between(shape, pack) * arch.hidden_size * (_FP32 + width)
    return _gathered(shape, pack) + rows * _FP32 + max(working, given + zeros)


def _logits(shape: Shape, pack: PlannedPack) -> float:
    """Values of the logits of a chunk."""
    count = max(1, -(-pack.scored // CHUNK_TOKENS[shape.device]))
    return -(-pack.scored // count) * shape.vocab_rows


def _chunk(shape: Shape, pack: PlannedPack) -> float:
    """Logits in fp32, scratch for two blocks of them, and what the products take. With kernels, what forward
    leaves and takes."""
    if shape.kernels:
        return min(KEEP_BYTES, pack.scored * shape.vocab_rows * shape.width) + (
            pack.scored * shape.arch.hidden_size * shape.width
        )
    logits = _logits(shape, pack)
    chunk_rows = logits // shape.vocab_rows
    block = min(chunk_rows, max(1, BLOCK_LOGITS[shape.device] // shape.vocab_rows)) * shape.vocab_rows
    # Only CUDA multiplies bf16 into fp32: elsewhere there is a copy of the weight.
    widened = shape.device == "cpu" and shape.width < _FP32
    copy = shape.vocab_rows * shape.arch.hidden_size * _FP32 if widened else 0
    states = chunk_rows * shape.arch.hidden_size * (_FP32 if widened else shape.width)
    return (logits + 2 * block) * _FP32 + copy + states
