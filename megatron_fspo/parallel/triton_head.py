"""The kernels of the log-prob head on a GPU: logits are made, used and forgotten tile by tile.

Beside the chunked products of :mod:`~megatron_fspo.parallel.head`, which has the formulas, the collectives
and the autograd function; here is what one rank does with its columns of the vocabulary. Products, with n
rows, V columns and H hidden (each 2·n·V·H FLOP):

1. forward: z, in tiles that end as four statistics per row and split of the vocabulary. exp(z - top of the
   tile) of the first columns is kept in bf16, up to ``keep_bytes``;
2. backward: z again, of the columns that were not kept;
3. and 4., of cuBLAS: d hidden and d weight, from blocks of columns of d loss / d z in bf16, ``block_bytes``.

So there are three products where n·V·2 bytes fit into ``keep_bytes``, as in a head that holds its logits, and
four at most. The gradient of the weight cannot be made in forward: its sum over rows needs each row's
upstream gradient, which is known when the whole sequence is. Beyond what is kept, memory is 16 bytes per row
and split in forward; in backward the block, the rows' hidden states and their gradient in fp32.

Sums are fp32, operands bf16; d loss / d z is rounded to bf16 for its products. A label's own, 1 - p, comes
from its log-prob, not from what was kept. No atomics: the same bits from call to call.

On a CPU, under ``TRITON_INTERPRET=1``, the kernels run for tests, on fp32 too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_fspo.parallel.triton_kernels import backward_kernel, forward_kernel

_PROGRAMS = 1024  # fewest that are worth longer splits
_MOST_TILES = 16  # of a split


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles of z, [rows, columns] in steps of ``depth`` along H, and how they are made."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    descriptors: bool
    """Tiles of the operands come by the tensor memory accelerator."""
    group: int = 16
    """Row tiles that are at work side by side, so that their hidden states stay in L2."""


AMPERE = Config(rows=128, columns=128, depth=32, warps=8, stages=4, descriptors=False)
HOPPER = Config(rows=128, columns=256, depth=64, warps=8, stages=4, descriptors=True)
# Larger tiles spill there: what is multiplied lies in tensor memory, what is kept in registers.
BLACKWELL = Config(rows=128, columns=128, depth=64, warps=8, stages=4, descriptors=True)
CONFIGS = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: AMPERE}
"""By the major number of the compute capability; 12 has about the shared memory of 8.6."""
INTERPRETED = Config(rows=16, columns=16, depth=16, warps=1, stages=1, descriptors=True, group=2)


@torch.library.custom_op("fspo_head::statistics", mutates_args=())
def statistics(
    states: Tensor, weight: Tensor, columns: Tensor, temperature: float, keep_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of rows over this rank's columns, by splits of the vocabulary.

    Args:
        states: [n, H], n > 0.
        weight: [V, H], V > 0, without padding.
        columns: [n] which column is the label's; out of [0, V) it is another rank's.
        temperature: divides the logits.
        keep_bytes: what may be left for backward.

    Returns:
        [splits, 4, n] max, Σ exp(z - max), Σ exp(z - max) (z - max), target (or 0), in fp32; exp(z - top) of
        the first K columns [n, K]; and their tops [K / columns of a tile, n].
    """
    config = _config_of(states, weight)
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
    config, n = _config_of(states, weight), len(states)
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
    """Add this rank's share of the gradient of the states, and that of the weight.

    Args:
        grad_states: [u, H] fp32, or None where nobody wants it.
        grad_weight: [at least V, H] fp32, or None.
        states: [u, H], u > 0, those rows that have an upstream gradient.
        weight: as in forward.
        columns: [u].
        stats: [6, u] m, Z, H and log p over the whole vocabulary, upstream gradients of log p and H; fp32.
        used: [u] the place of each row among the n of forward.
        kept: of forward.
        tops: of forward.
        temperature: as in forward.
        block_bytes: of a block of d loss / d logit; at least one tile of columns.
    """
    config, width = _config_of(states, weight), len(weight)
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
    """[5, u]: m; log Z; a and b, with which d loss / d logit before the temperature is p · (a + b · log p);
    and that of the label's logit."""
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
    """d loss / d logit of the columns from start to the end of the weight, into the block."""
    (u, size), width, from_kept = block.shape, len(weight), start < kept.shape[1]
    config = _config_of(states, weight, from_kept=from_kept)
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


def _config_of(states: Tensor, weight: Tensor, *, from_kept: bool = False) -> Config:
    """The tiles for these operands on their device."""
    config = INTERPRETED
    if states.is_cuda:
        config = CONFIGS[torch.cuda.get_device_capability(states.device)[0]]
    places = (states.shape[1], weight.storage_offset())
    if config.descriptors and any(place * weight.element_size() % 16 for place in places):
        config = AMPERE  # what descriptors describe is aligned to 16 bytes
    return flat(config) if from_kept else config


def flat(config: Config) -> Config:
    """The tiles where nothing is multiplied."""
    return replace(config, rows=16)


def _tiles_of_a_split(n: int, width: int, config: Config) -> int:
    """Column tiles that one program goes through: more of them, where that leaves enough programs."""
    programs: int = triton.cdiv(n, config.rows) * triton.cdiv(width, config.columns)
    return min(max(1, programs // _PROGRAMS), _MOST_TILES)


def _operands(states: Tensor, weight: Tensor, config: Config) -> tuple[Any, Any]:
    """The two as the kernels take them."""
    if not config.descriptors:
        return states, weight
    return (
        TensorDescriptor.from_tensor(states, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(weight, [config.columns, config.depth]),
    )


def constants(config: Config, hidden: int, *, widen: bool = False) -> dict[str, Any]:
    """What the kernels are compiled for: the tiles, and H. ``widen`` bf16 to fp32 before it is multiplied:
    interpreted, ``tl.dot`` would take its bits for integers."""
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
    """out += left @ right, with sums in fp32."""
    if out.is_cuda:
        torch.addmm(out, left, right, out=out, out_dtype=out.dtype)
    else:  # only CUDA multiplies bf16 into fp32
        out.addmm_(left.to(out.dtype), right.to(out.dtype))
