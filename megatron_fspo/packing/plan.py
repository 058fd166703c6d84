"""Which sequence goes to which rank and micro-batch. Integers only: the same answer on every rank.

Invariants (asserted by the tests): every sequence is placed exactly once; every rank gets the same number
of micro-batches; no micro-batch holds more than ``max_tokens``; the plan depends on the lengths alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], *, ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Spread sequences over ranks × micro-batches with about equal tokens each.

    Longest first, each into the emptiest bin (LPT scheduling), with as few bins as fit. The bins are then
    dealt out in a snake, fullest first, so that the ranks carry about the same load.

    Args:
        lengths: tokens of each sequence, prompt and response; all ≥ 1.
        ranks: data-parallel size.
        max_tokens: tokens that one micro-batch may hold.

    Returns:
        ``plan[rank][micro_batch]``: indices into ``lengths``, ascending. With fewer sequences than bins
        some micro-batches are empty lists.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit a micro-batch of {max_tokens}")
    per_rank = max(1, -(-sum(lengths) // (max_tokens * ranks)))
    while (bins := _fill(lengths, per_rank * ranks, max_tokens)) is None:
        per_rank += 1
    bins.sort(key=lambda bin: (-sum(lengths[i] for i in bin), bin))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in range(per_rank):
        order = range(ranks) if row % 2 == 0 else reversed(range(ranks))
        for rank, bin in zip(order, bins[row * ranks : (row + 1) * ranks], strict=True):
            plan[rank].append(bin)
    return plan


def _fill(lengths: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """``num_bins`` bins of indices, or None where they overflow."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, number) for number in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = heapq.heappop(emptiest)
        if load + lengths[index] > max_tokens:
            return None
        bins[number].append(index)
        heapq.heappush(emptiest, (load + lengths[index], number))
    return [sorted(bin) for bin in bins]
