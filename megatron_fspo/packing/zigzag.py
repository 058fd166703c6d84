"""Which tokens of a packed row lie on which context-parallel rank.

Every sequence is cut into 2·size equal chunks; rank r holds chunk r and chunk 2·size - 1 - r of each. Under
a causal mask a late chunk attends to more keys than an early one, so the pairs cost all ranks the same. It is
the layout that Transformer Engine's context-parallel attention and Megatron's packed RoPE expect.

``borders`` are cumulative padded lengths from 0; every length is a multiple of 2·size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunks_per_sequence(size: int) -> int:
    """Chunks that every sequence is cut into for ``size`` ranks; its padded length is a multiple of it."""
    return 2 * size if size > 1 else 1


def local_rows(padded_lengths: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The tokens that ``rank`` holds, in the order it holds them.

    Args:
        padded_lengths: [n], multiples of 2·size where size > 1.

    Returns:
        of each token [t / size], the sequence it is of, and its position there.

    Raises:
        ValueError: a length that does not split.
    """
    chunks = chunks_per_sequence(size)
    if (padded_lengths % chunks).any():
        wrong = int(padded_lengths[padded_lengths % chunks != 0][0])
        raise ValueError(f"a sequence of {wrong} tokens does not split into {chunks} chunks")
    held = padded_lengths // size
    sequence = torch.repeat_interleave(held)
    place = torch.arange(len(sequence), device=held.device) - (held.cumsum(0) - held)[sequence]
    if size == 1:
        return sequence, place
    chunk = (padded_lengths // chunks)[sequence]
    first = torch.where(place < chunk, rank * chunk, (2 * size - 1 - rank) * chunk - chunk)
    return sequence, first + place


def local_positions(borders: Tensor, rank: int, size: int) -> Tensor:
    """Positions in the whole row [t / size] of the tokens that ``rank`` holds, in the order it holds them."""
    borders = borders.long()
    sequence, place = local_rows(borders.diff(), rank, size)
    return borders[sequence] + place


def gathered_positions(borders: Tensor, size: int) -> Tensor:
    """For each position of the whole row [t], where it is when the ranks' rows are laid end to end."""
    laid = torch.cat([local_positions(borders, rank, size) for rank in range(size)])
    where = torch.empty_like(laid)
    where[laid] = torch.arange(len(laid), device=laid.device)
    return where
