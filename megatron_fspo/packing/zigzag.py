"""Which tokens of a packed row lie on which context-parallel rank.

Every sequence is cut into 2·size equal chunks; rank r holds chunk r and chunk 2·size - 1 - r of each. Under
a causal mask a late chunk attends to more keys than an early one, so the pairs cost all ranks the same. It is
the layout that Transformer Engine's context-parallel attention and Megatron's packed RoPE expect.

``borders`` are cumulative padded lengths from 0; every length is a multiple of 2·size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def local_positions(borders: Sequence[int], rank: int, size: int) -> list[int]:
    """Positions in the whole row of the tokens that ``rank`` holds, in the order it holds them."""
    if size == 1:
        return list(range(borders[-1]))
    mine: list[int] = []
    for first, end in pairwise(borders):
        chunk, rest = divmod(end - first, 2 * size)
        if rest:
            raise ValueError(f"a sequence of {end - first} tokens does not split into {2 * size} chunks")
        for number in (rank, 2 * size - 1 - rank):
            mine.extend(range(first + number * chunk, first + (number + 1) * chunk))
    return mine


def gathered_positions(borders: Sequence[int], size: int) -> list[int]:
    """For each position of the whole row, where it is when the ranks' rows are laid end to end."""
    where = [0] * borders[-1]
    laid = (position for rank in range(size) for position in local_positions(borders, rank, size))
    for place, position in enumerate(laid):
        where[position] = place
    return where
