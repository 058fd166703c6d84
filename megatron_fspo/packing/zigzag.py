"""How context-parallel ranks share the tokens of a pack.

Every sequence is cut into 2·size equal chunks; rank r holds chunks r and 2·size − 1 − r of each (zigzag).
Under a causal mask, late chunks attend to more keys than early ones, so these pairs cost all ranks the same.
Transformer Engine's context-parallel attention and Megatron's packed RoPE expect this layout. ``borders`` are
cumulative padded lengths from 0; every length is a multiple of 2·size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def padded_length(length: int, context: int = 1, *, rows: int = 1) -> int:
    """Return the tokens of a sequence in a pack, padded for ``context`` ranks; an upper bound for several
    rows."""
    chunks = chunks_per_sequence(context)
    length += (rows - 1) * (chunks - 1)
    return length + -length % chunks


def chunks_per_sequence(size: int) -> int:
    """Return the number of chunks per sequence for ``size`` ranks; padded lengths are a multiple of it."""
    return 2 * size if size > 1 else 1


def local_runs(padded_lengths: Tensor, rank: int, size: int) -> Tensor:
    """Return the positions of each sequence that ``rank`` holds, in the order it holds them.

    Args:
        padded_lengths: [n], multiples of 2·size if size > 1.
        rank: context-parallel rank.
        size: context-parallel size.

    Returns:
        [n, runs, 2] first position and end of each run.

    Raises:
        ValueError: a length does not split into chunks.
    """
    chunks = chunks_per_sequence(size)
    if (padded_lengths % chunks).any():
        wrong = int(padded_lengths[padded_lengths % chunks != 0][0])
        raise ValueError(f"a sequence of {wrong} tokens does not split into {chunks} chunks")
    numbers = padded_lengths.new_tensor([0] if size == 1 else [rank, chunks - 1 - rank])
    first = padded_lengths[:, None] // chunks * numbers
    return torch.stack([first, first + padded_lengths[:, None] // chunks], dim=-1)


def local_positions(borders: Tensor, rank: int, size: int) -> Tensor:
    """Return the positions in the whole row [t / size] of the tokens of ``rank``, in the order it holds
    them."""
    borders = borders.long()
    runs = (local_runs(borders.diff(), rank, size) + borders[:-1, None, None]).flatten(0, 1)
    lengths = runs.diff(dim=1)[:, 0]
    run = torch.repeat_interleave(lengths)
    return torch.arange(len(run), device=run.device) + (runs[:, 0] - lengths.cumsum(0) + lengths)[run]


def gathered_positions(borders: Tensor, size: int) -> Tensor:
    """Return, for each position of the whole row [t], its index when the ranks' rows are concatenated."""
    laid = torch.cat([local_positions(borders, rank, size) for rank in range(size)])
    where = torch.empty_like(laid)
    where[laid] = torch.arange(len(laid), device=laid.device)
    return where
