"""Which sequence goes to which rank and micro-batch. Integers only: the same answer on every rank.

Invariants (asserted by the tests): every sequence is placed exactly once; every rank gets the same number
of micro-batches; no micro-batch holds more than ``max_tokens``; the plan depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence


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
    per_rank = _round_up(max(1, -(-sum(lengths) // (max_tokens * ranks))), count_multiple_of)
    while (bins := _fill(lengths, costs, per_rank * ranks, max_tokens)) is None:
        per_rank += count_multiple_of
    bins.sort(key=lambda bin: (-sum(costs[i] for i in bin), bin))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in range(per_rank):
        order = range(ranks) if row % 2 == 0 else reversed(range(ranks))
        for rank, bin in zip(order, bins[row * ranks : (row + 1) * ranks], strict=True):
            plan[rank].append(bin)
    return plan


def attention_costs(lengths: Sequence[int], *, linear_size: int, attention_size: int) -> list[int]:
    """Multiplications of one layer's forward pass on each sequence.

    Every token passes the layer's matrices; causal attention adds two products of on average L / 2 keys::

        cost(L) = L · linear_size + L² · attention_size

    Args:
        linear_size: parameters of a layer's matrices.
        attention_size: query heads × head size.
    """
    return [length * linear_size + length * length * attention_size for length in lengths]


def _fill(
    lengths: Sequence[int], costs: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """``num_bins`` bins of indices, or None where they overflow."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cost, tokens = [0] * num_bins, [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        room = [number for number in range(num_bins) if tokens[number] + lengths[index] <= max_tokens]
        if not room:
            return None
        number = min(room, key=lambda number: (cost[number], number))
        bins[number].append(index)
        cost[number] += costs[index]
        tokens[number] += lengths[index]
    return [sorted(bin) for bin in bins]


def _round_up(count: int, multiple: int) -> int:
    return count + -count % multiple
