"""Memory of the log-prob head, with the chunks of :mod:`megatron_fspo.parallel.head`."""

from __future__ import annotations

from megatron_fspo.lab.plan.shape import Pack, Shape, between
from megatron_fspo.parallel.head import BLOCK_LOGITS, CHUNK_TOKENS

_FP32 = 4
_PER_ROW = 8 + 8 + 3 * _FP32  # index, label, m, Z and H


def head_saved(shape: Shape, pack: Pack) -> float:
    """What it keeps of a micro-batch for backward: hidden states and a few values per row. What sequence
    parallel gathers is there only from its forward to its backward."""
    return between(shape, pack) * shape.arch.hidden_size * shape.width + _PER_ROW * pack.scored


def _gathered(shape: Shape, pack: Pack) -> float:
    if not shape.parallel.sequence:
        return 0
    return pack.tokens / shape.parallel.context * shape.arch.hidden_size * shape.width


def head_forward(shape: Shape, pack: Pack) -> float:
    """The most beside that, in forward: the logits of one chunk."""
    # Megatron widens the last stage's output to fp32, which the head narrows again.
    widened = between(shape, pack) * shape.arch.hidden_size * _FP32 if shape.width < _FP32 else 0
    return widened + _gathered(shape, pack) + _chunk(shape, pack)


def head_backward(shape: Shape, pack: Pack) -> float:
    """The most in backward: that chunk again with the gradients of the rows, or what it ends with."""
    arch, width = shape.arch, shape.width
    rows = pack.scored * arch.hidden_size
    partial = rows * _FP32
    # On CUDA bf16 logits go into the products.
    narrowed = 2 * _logits(shape, pack) if shape.device == "cuda" and width < _FP32 else 0
    # Autograd gets zeros for the weight, whose gradient went to main_grad.
    zeros = shape.vocab_rows * arch.hidden_size * width
    whole = pack.tokens / shape.parallel.context * arch.hidden_size
    given = whole * width + (rows * width if width < _FP32 else 0)
    if shape.parallel.sequence:
        given = whole * _FP32 + between(shape, pack) * arch.hidden_size * (_FP32 + width)
    most = max(_chunk(shape, pack) + narrowed, given + zeros)
    return _gathered(shape, pack) + partial + most


def _logits(shape: Shape, pack: Pack) -> float:
    """Of a chunk, in values."""
    count = max(1, -(-pack.scored // CHUNK_TOKENS[shape.device]))
    return -(-pack.scored // count) * shape.vocab_rows


def _chunk(shape: Shape, pack: Pack) -> float:
    """Logits in fp32, scratch for two blocks of them, and what the products take."""
    logits = _logits(shape, pack)
    chunk_rows = logits // shape.vocab_rows
    block = min(chunk_rows, max(1, BLOCK_LOGITS[shape.device] // shape.vocab_rows)) * shape.vocab_rows
    # Only CUDA multiplies bf16 into fp32: elsewhere there is a copy of the weight.
    widened = shape.device == "cpu" and shape.width < _FP32
    copy = shape.vocab_rows * shape.arch.hidden_size * _FP32 if widened else 0
    states = chunk_rows * shape.arch.hidden_size * (_FP32 if widened else shape.width)
    return (logits + 2 * block) * _FP32 + copy + states
