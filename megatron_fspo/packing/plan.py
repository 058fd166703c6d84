"""The plan of which sequence goes to which rank and micro-batch. Integers only: the same on every rank.

Invariants (asserted by the tests): every sequence is placed exactly once; every rank gets the same number
of micro-batches; no micro-batch holds more than ``max_tokens``; the plan depends on the arguments alone.
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
    """Spread sequences over ranks × micro-batches with about equal cost each.

    Costliest first, each into the cheapest bin that has room for it (LPT scheduling), with as few bins as
    fit. The bins are then dealt out in a snake, costliest first, so that the ranks carry about the same load.

    n sequences take O(n log² n) as long as a longer one costs no less than a shorter one.

    Args:
        lengths: tokens of each sequence, prompt and response; all ≥ 1.
        ranks: data-parallel size.
        max_tokens: tokens that one micro-batch may hold.
        costs: what to balance, one per sequence; the lengths themselves by default. See
            :func:`attention_costs`.
        count_multiple_of: micro-batches per rank are a multiple of this (pipeline size under the interleaved
            schedule).

    Returns:
        ``plan[rank][micro_batch]``: indices into ``lengths``, ascending. With fewer sequences than bins
        some micro-batches are empty lists.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit a micro-batch of {max_tokens}")
    costs = lengths if costs is None else costs
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    # Two sequences of over half the limit cannot share a bin.
    fewest = max(-(-sum(lengths) // max_tokens), sum(2 * length > max_tokens for length in lengths))
    step = stride = count_multiple_of
    enough = -(-max(1, -(-fewest // ranks)) // step) * step  # per rank
    too_few = enough - step
    # Doubles the stride until a count fits, then halves the gap. Now and then the heuristic refuses a count
    # after a smaller one that fits; a smaller one is then missed.
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
        turns = range(ranks) if row % 2 == 0 else reversed(range(ranks))
        for rank, bin in zip(turns, bins[row * ranks : (row + 1) * ranks], strict=True):
            plan[rank].append(bin)
    return plan


def attention_costs(lengths: Sequence[int], *, linear_size: int, attention_size: int) -> list[int]:
    """Multiplications of one layer's forward pass on each sequence.

    Every token passes the layer's matrices; causal attention adds two products of on average L / 2 keys::

        cost(L) = L · linear_size + L² · attention_size

    Args:
        lengths: tokens of each sequence, its prompt included.
        linear_size: parameters of a layer's matrices.
        attention_size: query heads × head size.
    """
    return [length * linear_size + length * length * attention_size for length in lengths]


def _fill(
    lengths: Sequence[int], costs: Sequence[int], order: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """``num_bins`` bins of indices, or None where they overflow; sequences are placed in ``order``.

    A bin without room for one sequence is set aside until a sequence comes that it has room for. With
    lengths that fall along ``order`` it then has room for all that follow until it is filled further: each
    placement sets at most one bin aside once.
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
