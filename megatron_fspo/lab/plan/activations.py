"""Activations: the tensors that a micro-batch saves for backward, and the peak of an optimizer step.

Layers have two implementations. ``local``: our layers on Megatron's local specification, measured on CPUs
(``benchmarks/plan_memory.py``, ``tests/plan``); on GPUs a norm is one kernel, and the sizes are compared with
traces (``benchmarks/trace_layouts.py``). ``transformer_engine``, compared with traces: fused norm and linear,
fused RoPE and SwiGLU, and attention that saves q, k, v, its output and a log-sum-exp per row. Experts use
Megatron's all-to-all dispatcher, with tokens spread evenly over the ranks. The log-prob head uses the chunks
or the kernels of :mod:`megatron_fspo.parallel.head`. For latent attention and shared experts, only
``local`` was compared, with small models.

A plan assumes full packs. With full recompute, all layers save only their input, except one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import PlannedPack, Shape, between
from megatron_fspo.parallel.head import BLOCK_LOGITS, CHUNK_TOKENS, GRADIENT_BYTES, KEEP_BYTES
from megatron_fspo.weights import has_parameter

_BATCH = 45
"""Bytes per token of the micro-batch itself: ids, positions, labels, mask, segment, log-probs."""
_FP32 = 4
CHUNK = 64
"""Tokens that a gated delta net treats together."""
_PER_ROW = 8 + 8 + 4 * _FP32  # per row of the head: index, label, m, Z, H and log p


@dataclass(frozen=True)
class KeptTensor:
    """One or several tensors that a layer saves for backward: bytes by implementation of the layer."""

    what: str
    local: float
    transformer_engine: float


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes on a rank of one pipeline stage."""

    held: float
    """Saved for the backward of all micro-batches in flight."""
    micro_batches: float
    """Micro-batches in flight; a virtual stage counts by its share of the layers."""
    moments: dict[str, float]
    """Computation → bytes that it needs on top. Never two at a time."""


def layer_tensors(
    shape: Shape, pack: PlannedPack, experts: bool = False, linear: bool = False
) -> list[KeptTensor]:
    """Return what a layer saves for one micro-batch without recompute: with experts or an MLP, with linear or
    softmax attention."""
    return [*(_linear if linear else _attention)(shape, pack), *_mlp(shape, pack, experts)]


def layer_bytes(shape: Shape, pack: PlannedPack, experts: bool = False, linear: bool = False) -> float:
    """Return the bytes that such a layer saves for one micro-batch without recompute."""
    kept = layer_tensors(shape, pack, experts, linear)
    return sum(one.local if shape.layers == "local" else one.transformer_engine for one in kept)


def _norm(shape: Shape, pack: PlannedPack, name: str) -> Iterator[KeptTensor]:
    """Yield the tensors of a norm and the linear after it. On a CPU, torch's norm computes in fp32 and saves
    fp32 tensors; on a GPU it is one kernel."""
    tokens = between(shape, pack)
    hidden = tokens * shape.arch.hidden_size
    fused = shape.device == "cuda"
    if has_parameter(shape.arch, "input_layernorm.weight"):
        wide = hidden * (_norm_width(shape) if fused else _FP32)
        yield KeptTensor(f"input of the {name} norm", wide, hidden * shape.width)
        yield KeptTensor("its 1/rms", tokens * _FP32, tokens * _FP32)
        yield KeptTensor("its output before the weight", 0 if fused else hidden * _FP32, 0)
    yield KeptTensor("its output, into a linear", hidden * shape.width, hidden * _product_width(shape))


def _norm_width(shape: Shape) -> int:
    """Return the bytes of a value that a local norm saves on a GPU: those that are not torch's widen it."""
    return _FP32 if shape.arch.zero_centered_norms else shape.width


def _attention(shape: Shape, pack: PlannedPack) -> Iterator[KeptTensor]:
    arch, tp, width = shape.arch, shape.parallel.tensor, shape.width
    context = shape.parallel.context
    t = pack.tokens / context
    q, kv, heads = arch.q_size / tp, arch.kv_size / tp, arch.num_heads / tp
    out = arch.value_size / tp
    v = out * arch.num_kv_heads / arch.num_heads
    yield from _norm(shape, pack, "first")
    if arch.latent:
        ranks = between(shape, pack) * ((arch.latent.q_rank or 0) + arch.latent.kv_rank)
        keys = between(shape, pack) * arch.latent.rope_size * width
        wide = width if shape.device == "cuda" else 2 * _FP32
        yield KeptTensor("latent q, k and v into their norms", ranks * wide + keys, ranks * width + keys)
        yield KeptTensor("latent q, k and v, into linears", ranks * width, ranks * _product_width(shape))
    normed = arch.latent is None and has_parameter(arch, "self_attention.q_layernorm.weight")
    if arch.projection_norms:
        normed, both = False, t * (q + kv) * width + 2 * t * _FP32
        yield KeptTensor("q and k into their norms, and 1/rms", both, both)
    if normed:
        stats = t * (arch.num_heads + arch.num_kv_heads) / tp * _FP32
        # On a GPU the local norm saves a view of the linear's output; Transformer Engine's saves a copy.
        fused = shape.device == "cuda"
        yield KeptTensor("q into its norm", 0 if fused else t * q * _FP32, t * q * width)
        yield KeptTensor("k into its norm", 0 if fused or width == _FP32 else t * kv * _FP32, t * kv * width)
        yield KeptTensor("1/rms of q and k", stats, stats)
        yield KeptTensor("q and k before the weight", 0 if fused else t * (q + kv) * _FP32, 0)
    # The output of the linear stays while a view of it is saved. v is such a view, but Transformer Engine and
    # local context parallel copy it; then only a norm of k may still save a view.
    viewed = context == 1 or (normed and (width == _FP32 or shape.device == "cuda"))
    viewed = viewed and arch.latent is None  # which copies all three
    gates = q if arch.output_gate else 0
    product = t * (q + gates + 2 * kv) * width
    yield KeptTensor("q, k and v from their linear", product if viewed else 0, 0)
    # Our attention pads latent values to the size of keys.
    padded = t * kv * width if arch.latent and context == 1 else 0
    yield KeptTensor("v, into attention", padded, t * v * width)
    yield KeptTensor("cos and sin of q and of k", 4 * t * _rotated(shape) * width, 0)
    yield KeptTensor("q after RoPE", t * q * width, t * q * width)
    if context == 1:
        yield KeptTensor("k after RoPE", t * kv * width, t * kv * width)
    else:
        yield KeptTensor("k and v of all ranks", 2 * pack.tokens * kv * width, t * kv * width)
        masks = sum(length * length for length in pack.lengths) / context
        yield KeptTensor("masks", masks * width, 0)
    yield KeptTensor("log-sum-exp", t * heads * _FP32, t * heads * _FP32)
    yield KeptTensor("attention's output, by sequence", t * q * width, 0)
    if arch.output_gate:
        yield KeptTensor(
            "sigmoids of gates, and what they multiply", 2 * t * gates * width, 3 * t * gates * width
        )
    yield KeptTensor("attention's output, into a linear", t * out * width, t * out * width)


def _linear(shape: Shape, pack: PlannedPack) -> Iterator[KeptTensor]:
    """Yield the tensors of a gated delta net: in torch, or in flash-linear-attention's kernels, which are
    counted as its code reads."""
    arch, width, t = shape.arch, shape.width, pack.tokens
    assert arch.linear is not None
    heads, value = (n / shape.parallel.tensor for n in (arch.linear.value_heads, arch.linear.values))
    keys = heads * arch.linear.key_size
    channels = value + 2 * arch.linear.keys / shape.parallel.tensor
    chunk, memory = CHUNK * heads, value * arch.linear.key_size / CHUNK
    yield from _norm(shape, pack, "first")
    yield KeptTensor("channels, into the convolution", t * channels * width, t * channels * width)
    yield KeptTensor("channels after it", t * channels * width, 0)
    yield KeptTensor("q and k into their norms", 2 * t * keys * _FP32, 2 * t * keys * width)
    yield KeptTensor("q, k and v", t * (2 * keys + value) * _FP32, t * (2 * keys + value) * width)
    yield KeptTensor("their products with rates and decays", t * (4 * keys + 3 * value) * _FP32, 0)
    yield KeptTensor("pairs within chunks", 5 * t * chunk * _FP32, t * chunk * width)
    yield KeptTensor("memories, a chunk each", 2 * t * memory * _FP32, 0)
    yield KeptTensor("rates and decays", 8 * t * heads * _FP32, 3 * t * heads * _FP32)
    yield KeptTensor("values that were read, into their norm", 2 * t * value * _FP32, t * value * _FP32)
    yield KeptTensor("gates, before and after silu", 2 * t * value * _FP32, 2 * t * value * _FP32)
    yield KeptTensor("normed values", 2 * t * value * width, 2 * t * value * width)
    yield KeptTensor("gated values, into a linear", t * value * width, t * value * width)


def _rotated(shape: Shape) -> float:
    arch = shape.arch
    return arch.latent.rope_size if arch.latent else arch.head_dim * arch.rotary_share


def _hidden_values(shape: Shape, pack: PlannedPack, experts: bool) -> float:
    """Return the values between the matrices of a layer's MLP, or of its experts and the shared one."""
    arch = shape.arch
    whole = arch.shared_ffn_size if experts else arch.ffn_size
    values = pack.tokens / shape.parallel.context * whole / shape.parallel.tensor
    return values + (_routed(shape, pack) * arch.expert_ffn_size if experts else 0)


def _mlp(shape: Shape, pack: PlannedPack, experts: bool) -> Iterator[KeptTensor]:
    arch, width = shape.arch, shape.width
    yield from _norm(shape, pack, "second")
    if has_parameter(arch, "mlp_bda.norm.weight"):
        size = 2 * between(shape, pack) * arch.hidden_size
        wide = size * (_norm_width(shape) if shape.device == "cuda" else 2 * _FP32)
        yield KeptTensor("inputs of the norms after attention and MLP", wide, size * width)
    values = _hidden_values(shape, pack, experts)
    if experts:
        assert arch.experts is not None
        scores = 2 * between(shape, pack) * arch.experts.count * _FP32
        yield KeptTensor("router's logits and probabilities", scores, scores)
        tokens = _routed(shape, pack) * arch.hidden_size * width
        yield KeptTensor("tokens at their experts", tokens, tokens)
    if experts and has_parameter(arch, "mlp.shared_experts.gate_weight"):
        shared = between(shape, pack) * arch.hidden_size * width
        yield KeptTensor("the shared expert's output, into its gate", shared, shared)
    yield KeptTensor("gate and up", 2 * values * width, 2 * values * width)
    if experts and arch.experts and arch.experts.clamp is not None:
        both = 2 * values * width  # with biases in Transformer Engine
        yield KeptTensor("clamped gate, and its sigmoid", both, both)
    yield KeptTensor("silu(gate)", values * width, 0)
    yield KeptTensor("up, into the product", values * width, 0)
    yield KeptTensor("silu(gate) · up, into a linear", values * width, values * _product_width(shape))


def _routed(shape: Shape, pack: PlannedPack) -> float:
    """Return the tokens that the experts of a rank get, counted once per expert."""
    assert shape.arch.experts is not None
    return between(shape, pack) * shape.arch.experts.per_token


def layer_input(shape: Shape, pack: PlannedPack) -> float:
    """Return the bytes that a layer saves with full recompute."""
    return between(shape, pack) * shape.arch.hidden_size * shape.width


def layer_backward(shape: Shape, pack: PlannedPack, experts: bool = False) -> float:
    """Return the peak bytes that the backward of a layer adds to the saved tensors: gradients of activations
    and, in local layers, of one matrix. With experts, recomputing its forward adds more."""
    arch, tp = shape.arch, shape.parallel.tensor
    t = pack.tokens / shape.parallel.context
    hidden = between(shape, pack) * arch.hidden_size
    values = _hidden_values(shape, pack, experts)
    if not experts:
        matrix = arch.hidden_size * arch.ffn_size / tp
        most = 2 * values  # of gate and up
    else:
        matrix = float(arch.hidden_size * arch.expert_ffn_size)
        # Tokens sent to the experts, those returned, and those sorted by sender.
        most = 3 * _routed(shape, pack) * arch.hidden_size
    if shape.layers == "local":
        most = max(most, values + matrix, t * arch.hidden_size + 2 * matrix - 3 * values)  # down; gate and up
    return (hidden + (t * arch.hidden_size if shape.parallel.sequence else 0) + most) * shape.width


def kept(shape: Shape, stage: int, chunk: int, pack: PlannedPack) -> float:
    """Return the bytes that one micro-batch holds in a model chunk from its forward to its backward."""
    width, hidden = shape.width, layer_input(shape, pack)
    # Angles of RoPE, and the micro-batch.
    total = max(pack.lengths) * _rotated(shape) * _FP32
    for experts, layers in shape.kinds(stage, chunk).items():
        total += layers * (hidden if shape.recompute else layer_bytes(shape, pack, experts))
    if (linear := shape.linear(stage, chunk)) and not shape.recompute:
        total += linear * (layer_bytes(shape, pack, linear=True) - layer_bytes(shape, pack))
    total += _BATCH * pack.tokens / shape.parallel.context
    # Megatron's schedule keeps the input from the previous stage and the output to the next one. In fp32 and
    # with recompute, that input is also what the first layer saves.
    if (stage or chunk) and not (shape.recompute or width == _FP32):
        total += hidden
    if not shape.is_last(stage, chunk):
        return total + hidden
    # The final norm.
    final = 2 * _FP32 / width * hidden if shape.layers == "local" and shape.device == "cpu" else hidden
    return total + final + _head_saved(shape, pack)


def in_flight(shape: Shape, stage: int, micro_batches: int) -> int:
    """Return the largest number of forwards of a stage's chunks that wait for their backward."""
    stages, virtual = shape.parallel.pipeline, shape.parallel.virtual_pipeline
    if virtual == 1:
        return min(micro_batches, stages - stage)
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages
    return min(micro_batches * virtual, ahead + 1)


def activations(shape: Shape, stage: int, pack: PlannedPack, micro_batches: int) -> Activations:
    """Return the activations of an optimizer step of ``micro_batches`` times ``pack``, on one rank of the
    pipeline stage ``stage``, from 0."""
    virtual = shape.parallel.virtual_pipeline
    chunks = [kept(shape, stage, chunk, pack) for chunk in range(virtual)]
    flying = in_flight(shape, stage, micro_batches)
    held = sum(chunks) * flying / virtual if flying % virtual else sum(chunks) * (flying // virtual)
    if shape.parallel.pipeline > 1:  # received and sent tensors
        held += 2 * layer_input(shape, pack)
    held += _gathered(shape, pack)  # a buffer that Megatron keeps
    kinds = {experts for chunk in range(virtual) for experts in shape.kinds(stage, chunk)}
    again = 0.0
    # A layer's input is held already, but a local layer's first norm saves one more in fp32. And its output.
    if shape.recompute and shape.layers == "local" and shape.width < _FP32:
        again = layer_input(shape, pack)
    linears = {any(shape.linear(stage, chunk) for chunk in range(virtual)), False}
    again += max(
        layer_backward(shape, pack, kind)
        + (max(layer_bytes(shape, pack, kind, linear) for linear in linears) if shape.recompute else 0)
        for kind in kinds
    )
    table = float(shape.vocab_rows * shape.arch.hidden_size * shape.width)
    tied = shape.arch.tied and shape.parallel.pipeline == 1
    moments = {"a layer's backward": again + (table if tied else 0)}
    if shape.is_last(stage):
        # Megatron converts the last stage's output to fp32, and the head converts it back.
        widened = between(shape, pack) * shape.arch.hidden_size * _FP32 if shape.width < _FP32 else 0
        moments["the head's forward"] = widened + _gathered(shape, pack) + _chunk(shape, pack)
        moments["the head's backward"] = _head_backward(shape, pack)
        moments["a layer's backward"] -= _head_saved(shape, pack)
    if stage == 0:
        # One micro-batch has released its layers by then. A tied table has two gradients and their sum.
        gone = chunks[0] - layer_input(shape, pack) * (shape.parallel.pipeline > 1)
        moments["the embedding's backward"] = (3 if tied else 1) * table - gone + layer_input(shape, pack)
    return Activations(held=held, micro_batches=flying / virtual, moments=moments)


def _product_width(shape: Shape) -> int:
    """Return the bytes per value of a linear's saved input; Transformer Engine saves it in FP8."""
    return 1 if shape.fp8 else shape.width


def _head_saved(shape: Shape, pack: PlannedPack) -> float:
    """Return the bytes of the log-prob head per micro-batch in flight: hidden states, a few values per row.
    Hidden states gathered by sequence parallel live only until the head's backward: ``moments`` has them."""
    return layer_input(shape, pack) + _PER_ROW * pack.scored


def _gathered(shape: Shape, pack: PlannedPack) -> float:
    """Return the bytes of the hidden states that sequence parallel gathers."""
    return layer_input(shape, pack) * shape.parallel.tensor if shape.parallel.sequence else 0


def _head_backward(shape: Shape, pack: PlannedPack) -> float:
    """Return the peak of the head's backward: a chunk and the gradients of the rows, or the final results."""
    arch, width = shape.arch, shape.width
    rows = pack.scored * arch.hidden_size
    # On CUDA, the matrix products take logits in bf16.
    narrowed = 2 * _logits(shape, pack) if shape.device == "cuda" and width < _FP32 else 0
    working = _chunk(shape, pack) + narrowed
    if shape.kernels:
        working = _chunk(shape, pack) + min(GRADIENT_BYTES, pack.scored * shape.vocab_rows * width)
    # The weight's gradient goes to main_grad; autograd gets zeros instead.
    zeros = shape.vocab_rows * arch.hidden_size * width
    whole = pack.tokens / shape.parallel.context * arch.hidden_size
    given = whole * width + (rows * width if width < _FP32 else 0)
    if shape.parallel.sequence:
        given = whole * _FP32 + between(shape, pack) * arch.hidden_size * (_FP32 + width)
    return _gathered(shape, pack) + rows * _FP32 + max(working, given + zeros)


def _logits(shape: Shape, pack: PlannedPack) -> float:
    """Return the number of logits of a chunk."""
    count = max(1, -(-pack.scored // CHUNK_TOKENS[shape.device]))
    return -(-pack.scored // count) * shape.vocab_rows


def _chunk(shape: Shape, pack: PlannedPack) -> float:
    """Return the bytes of a chunk: fp32 logits, scratch for two blocks of them, and the inputs of the matrix
    products. With kernels: the kept logits, and the hidden states."""
    if shape.kernels:
        return min(KEEP_BYTES, pack.scored * shape.vocab_rows * shape.width) + (
            pack.scored * shape.arch.hidden_size * shape.width
        )
    logits = _logits(shape, pack)
    chunk_rows = logits // shape.vocab_rows
    block = min(chunk_rows, max(1, BLOCK_LOGITS[shape.device] // shape.vocab_rows)) * shape.vocab_rows
    # Only CUDA multiplies bf16 with an fp32 result; elsewhere the weight is copied to fp32.
    widened = shape.device == "cpu" and shape.width < _FP32
    copy = shape.vocab_rows * shape.arch.hidden_size * _FP32 if widened else 0
    states = chunk_rows * shape.arch.hidden_size * (_FP32 if widened else shape.width)
    return (logits + 2 * block) * _FP32 + copy + states
