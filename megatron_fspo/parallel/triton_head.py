"""The log-prob head on a GPU, by Triton kernels that compute logits tile by tile.

This is the alternative to the chunked products of :mod:`~megatron_fspo.parallel.head`, which has the
formulas, the collectives and the autograd function. It computes one rank's share, its columns of the
vocabulary. Matrix products, with n rows, V columns and hidden size H (each 2·n·V·H FLOP):

1. forward: z, in tiles reduced to four statistics per row and split of the vocabulary. exp(z - running max)
   of the first columns is kept in bf16, up to ``keep_bytes``;
2. backward: z again, for the columns that were not kept;
3. and 4., by cuBLAS: d hidden and d weight, from blocks of columns of d loss / d z in bf16, ``block_bytes``.

If n·V·2 bytes fit into ``keep_bytes``, these are three products, as in a head that stores its logits; else
up to four. The weight gradient cannot be computed in forward: it needs each row's upstream gradient, which
depends on the whole sequence. Further memory: in forward 16 bytes per row and split; in backward the block,
the rows' hidden states and their gradient in fp32.

Sums are fp32, operands bf16; d loss / d z is rounded to bf16 for its products. The label's 1 - p is computed
from its log-prob, not from kept values. No atomics, so results are bit-identical between calls.

For tests the kernels also run on a CPU, with ``TRITON_INTERPRET=1``, in bf16 or fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_fspo.parallel.triton_kernels import backward_kernel, forward_kernel

_PROGRAMS = 1024  # longer splits of the vocabulary must leave at least this many programs
_MOST_TILES = 16  # per split


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch configuration: tiles of z are [rows, columns], computed in steps of ``depth`` along H."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    descriptors: bool
    """Load tiles of the operands by tensor descriptors, with the tensor memory accelerator."""
    group: int = 16
    """Row tiles processed together, so that their hidden states stay in L2."""


AMPERE = Config(rows=128, columns=128, depth=32, warps=8, stages=4, descriptors=False)
HOPPER = Config(rows=128, columns=256, depth=64, warps=8, stages=4, descriptors=True)
# Larger tiles spill registers, as accumulators are in tensor memory but the statistics in registers.
BLACKWELL = Config(rows=128, columns=128, depth=64, warps=8, stages=4, descriptors=True)
CONFIGS = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: AMPERE}
"""Major compute capability → configuration; 12 has about as much shared memory as 8.6."""
INTERPRETED = Config(rows=16, columns=16, depth=16, warps=1, stages=1, descriptors=True, group=2)


@torch.library.custom_op("fspo_head::statistics", mutates_args=())
def statistics(
    states: Tensor, weight: Tensor, columns: Tensor, temperature: float, keep_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute statistics of rows over this rank's columns, per split of the vocabulary.

    Args:
        states: [n, H], n > 0.
        weight: [V, H], V > 0, without padding.
        columns: [n] the label's column; outside [0, V) it is on another rank.
        temperature: divides the logits.
        keep_bytes: memory that may be kept for backward.

    Returns:
        [splits, 4, n] max, Σ exp(z - max), Σ exp(z - max) (z - max), target (or 0), in fp32; exp(z - top) of
        the first K columns [n, K]; and their tops (running max per row) [K / columns of a tile, n].
    """
    config = _choose_config(states, weight)
    table, kept, tops = _outputs(states, weight, columns, temperature, keep_bytes)
    n, width = len(states), len(weight)
    forward_kernel[(triton.cdiv(n, config.rows) * len(table),)](
        *_operands(states, weight, config),
        columns.contiguous(),
        table,
        kept,
        tops,
        n,
        width,
        1 / temperature,
        _tiles_of_a_split(n, width, config),
        kept.shape[1],
        **constants(config, states.shape[1], widen=not states.is_cuda),
    )
    return table, kept, tops


@statistics.register_fake
def _outputs(
    states: Tensor, weight: Tensor, columns: Tensor, temperature: float, keep_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    config, n = _choose_config(states, weight), len(states)
    tiles = triton.cdiv(len(weight), config.columns)
    kept = min(tiles, keep_bytes // (n * config.columns * states.element_size()))
    return (
        states.new_empty(
            triton.cdiv(tiles, _tiles_of_a_split(n, len(weight), config)), 4, n, dtype=torch.float32
        ),
        states.new_empty(n, kept * config.columns),
        states.new_empty(kept, n, dtype=torch.float32),
    )


def add_gradients(
    grad_states: Tensor | None,
    grad_weight: Tensor | None,
    states: Tensor,
    weight: Tensor,
    columns: Tensor,
    stats: Tensor,
    used: Tensor,
    kept: Tensor,
    tops: Tensor,
    *,
    temperature: float,
    block_bytes: int,
) -> None:
    """Add this rank's share of the gradients of states and weight.

    Args:
        grad_states: [u, H] fp32, or None if not needed.
        grad_weight: [at least V, H] fp32, or None if not needed.
        states: [u, H], u > 0, the rows with an upstream gradient.
        weight: as in :func:`statistics`.
        columns: [u], as in :func:`statistics`.
        stats: [6, u] fp32: m, Z, H and log p over the whole vocabulary, upstream gradients of log p and H.
        used: [u] index of each row among the n rows of :func:`statistics`.
        kept: result of :func:`statistics`.
        tops: result of :func:`statistics`.
        temperature: as in :func:`statistics`.
        block_bytes: size of a block of d loss / d logit; it has at least one tile of columns.
    """
    config, width = _choose_config(states, weight), len(weight)
    tiles = block_bytes // (len(states) * config.columns * states.element_size())
    size = min(max(1, tiles), triton.cdiv(width, config.columns)) * config.columns
    block = states.new_empty(len(states), size)
    factors = _factors(stats, temperature)
    border = min(kept.shape[1], width)
    starts = [*range(0, border, size), *range(border, width, size)]
    for start, stop in zip(starts, [*starts[1:], width], strict=True):
        some = weight[:stop]
        _logits_gradient(block, states, some, columns, factors, used, start, temperature, kept, tops)
        gradient = block[:, : stop - start]
        if grad_states is not None:
            _add_product(grad_states, gradient, weight[start:stop])
        if grad_weight is not None:
            _add_product(grad_weight[start:stop], gradient.t(), states)


def _factors(stats: Tensor, temperature: float) -> Tensor:
    """Return [5, u]: m; log Z; a and b of d loss / d(logit before temperature) = p · (a + b · log p); the
    same derivative for the label's logit."""
    top, total, entropy, log_p, grad_log_p, grad_entropy = stats
    scaled, scaled_entropy = grad_log_p / temperature, grad_entropy / temperature
    own = -scaled * torch.expm1(log_p) - scaled_entropy * log_p.exp() * (log_p + entropy)
    every = -scaled - scaled_entropy * entropy
    return torch.stack([top, total.log(), every, -scaled_entropy, own])


@torch.library.custom_op("fspo_head::logits_gradient", mutates_args=("block",))
def _logits_gradient(
    block: Tensor,
    states: Tensor,
    weight: Tensor,
    columns: Tensor,
    factors: Tensor,
    used: Tensor,
    start: int,
    temperature: float,
    kept: Tensor,
    tops: Tensor,
) -> None:
    """Write d loss / d logit of the columns from ``start`` to the end of ``weight`` into ``block``."""
    (u, size), width, from_kept = block.shape, len(weight), start < kept.shape[1]
    config = _choose_config(states, weight, from_kept=from_kept)
    tiles = triton.cdiv(min(size, width - start), config.columns)
    backward_kernel[(triton.cdiv(u, config.rows) * tiles,)](
        *_operands(states, weight, config),
        columns.contiguous(),
        factors,
        used.contiguous(),
        block,
        kept,
        tops,
        u,
        width,
        start,
        1 / temperature,
        size,
        kept.shape[1],
        len(kept),
        from_kept=from_kept,
        **constants(config, states.shape[1], widen=not states.is_cuda),
    )


@_logits_gradient.register_fake
def _(*_: Any) -> None:
    return None


def _choose_config(states: Tensor, weight: Tensor, *, from_kept: bool = False) -> Config:
    """Return the configuration for these operands on their device."""
    config = INTERPRETED
    if states.is_cuda:
        config = CONFIGS[torch.cuda.get_device_capability(states.device)[0]]
    places = (states.shape[1], weight.storage_offset())
    if config.descriptors and any(place * weight.element_size() % 16 for place in places):
        config = AMPERE  # descriptors need an alignment of 16 bytes
    return flat(config) if from_kept else config


def flat(config: Config) -> Config:
    """Return the configuration for the kernel without a product."""
    return replace(config, rows=16)


def _tiles_of_a_split(n: int, width: int, config: Config) -> int:
    """Return the column tiles per program: more than one only if enough programs remain."""
    programs: int = triton.cdiv(n, config.rows) * triton.cdiv(width, config.columns)
    return min(max(1, programs // _PROGRAMS), _MOST_TILES)


def _operands(states: Tensor, weight: Tensor, config: Config) -> tuple[Any, Any]:
    """Return both as arguments of the kernels: tensors or descriptors."""
    if not config.descriptors:
        return states, weight
    return (
        TensorDescriptor.from_tensor(states, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(weight, [config.columns, config.depth]),
    )


def constants(config: Config, hidden: int, *, widen: bool = False) -> dict[str, Any]:
    """Return compile-time constants of the kernels. ``widen`` converts bf16 to fp32 before products: in the
    interpreter, ``tl.dot`` would read bf16 bits as integers."""
    return {
        "hidden_size": hidden,
        "block_m": config.rows,
        "block_n": config.columns,
        "block_k": config.depth,
        "group_m": config.group,
        "descriptors": config.descriptors,
        "widen": widen,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, accumulated in fp32."""
    if out.is_cuda:
        torch.addmm(out, left, right, out=out, out_dtype=out.dtype)
    else:  # only CUDA multiplies bf16 with fp32 results
        out.addmm_(left.to(out.dtype), right.to(out.dtype))
