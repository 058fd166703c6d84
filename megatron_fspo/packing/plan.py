"""The plan that assigns sequences to ranks and micro-batches, from integers only: the same on every rank.

Every sequence is placed exactly once, every rank gets the same number of micro-batches, and no micro-batch
exceeds ``max_tokens``. Tests check these invariants.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    costs: Sequence[int] | None = None,
    count_multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Distribute sequences over ranks × micro-batches of about equal cost.

    Sequences are placed by falling cost, each into the cheapest bin with room for it (LPT scheduling), with
    as few bins as possible. The bins are then dealt to the ranks in a snake, costliest first, so that ranks
    carry about the same load. n sequences take O(n log² n) if none costs less than a shorter one.

    Args:
        lengths: tokens of each sequence, prompt and response; all ≥ 1.
        ranks: data-parallel size.
        max_tokens: most tokens of a micro-batch.
        costs: what to balance, one per sequence, such as :func:`attention_costs`; default: the lengths.
        count_multiple_of: micro-batches per rank are a multiple of this (pipeline size if interleaved).

    Returns:
        ``plan[rank][micro_batch]``: indices into ``lengths``, ascending. With fewer sequences than bins, some
        micro-batches are empty lists.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit a micro-batch of {max_tokens}")
    costs = lengths if costs is None else costs
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    # Two sequences longer than half the limit cannot share a bin.
    fewest = max(-(-sum(lengths) // max_tokens), sum(2 * length > max_tokens for length in lengths))
    step = stride = count_multiple_of
    enough = -(-max(1, -(-fewest // ranks)) // step) * step  # per rank
    too_few = enough - step
    # Double the stride until a count fits, then bisect. The heuristic is not quite monotonic: it may reject a
    # count although a smaller one fits, which is then missed.
    while (bins := _fill(lengths, costs, order, enough * ranks, max_tokens)) is None:
        too_few, enough, stride = enough, enough + stride, 2 * stride
    while enough - too_few > step:
        middle = too_few + (enough - too_few) // (2 * step) * step
        if (fewer := _fill(lengths, costs, order, middle * ranks, max_tokens)) is None:
            too_few = middle
        else:
            enough, bins = middle, fewer
    bins.sort(key=lambda bin: (-sum(costs[i] for i in bin), bin))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in range(len(bins) // ranks):
        dealt = range(ranks) if row % 2 == 0 else reversed(range(ranks))
        for rank, bin in zip(dealt, bins[row * ranks : (row + 1) * ranks], strict=True):
            plan[rank].append(bin)
    return plan


def attention_costs(lengths: Sequence[int], *, linear_size: int, attention_size: int) -> list[int]:
    """Return the multiplications of one layer's forward pass on each sequence.

    Every token passes the layer's matrices; causal attention adds two products with L / 2 keys on average::

        cost(L) = L · linear_size + L² · attention_size

    Args:
        lengths: tokens of each sequence, prompt included.
        linear_size: parameters of a layer's matrices.
        attention_size: query heads × head size.
    """
    return [length * linear_size + length * length * attention_size for length in lengths]


def _fill(
    lengths: Sequence[int], costs: Sequence[int], order: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Return ``num_bins`` bins of indices, placed in ``order``, or None if they overflow.

    A bin without room for a sequence is set aside until one comes that fits. If lengths fall along ``order``,
    it has room for all later ones until it is filled further: each placement sets at most one bin aside.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    cheapest = [(0, number) for number in range(num_bins)]  # a heap of (cost, bin)
    aside: list[tuple[int, int, int]] = []  # a heap of (-room, cost, bin)
    for index in order:
        length = lengths[index]
        while aside and -aside[0][0] >= length:
            _, cost, number = heappop(aside)
            heappush(cheapest, (cost, number))
        while cheapest and room[cheapest[0][1]] < length:
            cost, number = heappop(cheapest)
            heappush(aside, (-room[number], cost, number))
        if not cheapest:
            return None
        cost, number = cheapest[0]
        bins[number].append(index)
        room[number] -= length
        heapreplace(cheapest, (cost + costs[index], number))
    return [sorted(bin) for bin in bins]
