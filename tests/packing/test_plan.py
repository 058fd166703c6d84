"""The plan: every sequence once, no pack too full, equal work for every rank, the same on every rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.packing.plan import attention_costs, plan_micro_batches


def test_packs_are_dealt_out_back_and_forth() -> None:
    """Packs of 4, 3, 2 and 1 tokens: dealt out in order, the ranks would get 4 + 2 and 3 + 1."""
    assert plan_micro_batches([1, 2, 3, 4], ranks=2, max_tokens=4) == [[[3], [0]], [[2], [1]]]
    # Equal lengths keep their order.
    assert plan_micro_batches([2, 2, 2, 2], ranks=2, max_tokens=4) == [[[0, 2]], [[1, 3]]]


def test_fewer_sequences_than_ranks_leave_empty_packs() -> None:
    assert plan_micro_batches([5], ranks=3, max_tokens=5) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], ranks=2, max_tokens=5) == [[[]], [[]]]


def test_what_does_not_fit_by_a_token() -> None:
    assert plan_micro_batches([7, 7, 4], ranks=1, max_tokens=10) == [[[0], [1], [2]]]
    with pytest.raises(ValueError, match="a sequence of 11 tokens does not fit a micro-batch of 10"):
        plan_micro_batches([3, 11, 4], ranks=2, max_tokens=10)


def test_costs_are_what_is_balanced() -> None:
    """By tokens a short sequence joins the long one; by attention the long one outweighs all others."""
    lengths = [6, 2, 2, 2, 2]
    assert plan_micro_batches(lengths, ranks=2, max_tokens=99) == [[[0, 4]], [[1, 2, 3]]]
    costs = attention_costs(lengths, linear_size=1, attention_size=1)
    assert costs == [42, 6, 6, 6, 6]
    assert plan_micro_batches(lengths, ranks=2, max_tokens=99, costs=costs) == [[[0]], [[1, 2, 3, 4]]]


def test_a_costlier_pack_takes_what_the_cheapest_has_no_room_for() -> None:
    plan = plan_micro_batches([3, 9, 4], ranks=2, max_tokens=10, costs=[100, 50, 10])
    assert plan == [[[0, 2]], [[1]]]
    # The cheapest is not forgotten: it takes a later one that just fits.
    plan = plan_micro_batches([4, 7, 6, 3], ranks=2, max_tokens=10, costs=[100, 50, 10, 5])
    assert plan == [[[0, 2]], [[1, 3]]]


def oracle_fill(
    lengths: Sequence[int], costs: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Costliest first, each into the cheapest bin that has room: every bin looked at for every sequence."""
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


Job = tuple[list[int], list[int], int, int, int]


@st.composite
def crowded_jobs(draw: st.DrawFn) -> Job:
    """Lengths, costs, ranks, max_tokens and multiple; lengths near fractions of the limit waste most."""
    max_tokens = draw(st.sampled_from([7, 64, 1000]))
    shortest = draw(st.sampled_from([1, max_tokens // 5 + 1, max_tokens // 3 + 1, max_tokens // 2 + 1]))
    lengths = draw(st.lists(st.integers(shortest, max_tokens), max_size=40))
    costs = draw(
        st.sampled_from(
            [
                lengths,
                attention_costs(lengths, linear_size=30, attention_size=1),
                # Nobody asks for these: what costs most is neither the longest nor the shortest.
                [length * 7919 % 101 for length in lengths],
            ]
        )
    )
    return lengths, costs, draw(st.integers(1, 9)), max_tokens, draw(st.integers(1, 3))


@given(job=crowded_jobs())
def test_the_bins_are_those_of_the_plain_search_and_one_step_fewer_overflows(job: Job) -> None:
    lengths, costs, ranks, max_tokens, multiple = job
    plan = plan_micro_batches(
        lengths, ranks=ranks, max_tokens=max_tokens, costs=costs, count_multiple_of=multiple
    )
    (per_rank,) = {len(packs) for packs in plan}
    assert len(plan) == ranks and per_rank % multiple == 0
    assert sorted(index for packs in plan for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= max_tokens for packs in plan for pack in packs)
    expected = oracle_fill(lengths, costs, per_rank * ranks, max_tokens)
    assert expected is not None
    assert sorted(pack for packs in plan for pack in packs) == sorted(expected)
    if per_rank > multiple:
        assert oracle_fill(lengths, costs, (per_rank - multiple) * ranks, max_tokens) is None


@given(job=crowded_jobs())
def test_ranks_and_packs_differ_by_less_than_a_longest_sequence(job: Job) -> None:
    """Both bounds follow from the construction.

    Packs: the emptiest takes the next sequence, so before its last one the fullest was no fuller than the
    emptiest. Ranks: packs are dealt out in falling order, back and forth, so one rank gains on another in
    every other row, and there by no more than the fall within the row: in all by no more than from the
    fullest pack to the emptiest.
    """
    lengths, _, ranks, max_tokens, _ = job
    plan = plan_micro_batches(lengths, ranks=ranks, max_tokens=max_tokens)
    longest = max(lengths, default=0)
    loads = [[sum(lengths[i] for i in pack) for pack in micro_batches] for micro_batches in plan]
    packs = [load for rank in loads for load in rank]
    assert max(packs) - min(packs) <= longest
    totals = [sum(rank) for rank in loads]
    assert max(totals) - min(totals) <= longest


LIMIT = 32768
MIXES: dict[str, Callable[[random.Random], int]] = {
    "uniform": lambda draw: draw.randint(2000, 16384),
    "long-tailed": lambda draw: min(17408, max(200, int(draw.lognormvariate(8, 1)))),
    "95% truncated": lambda draw: (
        17408 - draw.randint(0, 900) if draw.random() < 0.95 else draw.randint(2000, 16000)
    ),
    "just over half": lambda draw: LIMIT // 2 + draw.randint(1, 900),
    "just over a third": lambda draw: LIMIT // 3 + draw.randint(1, 900),
    "just over a half, a third or a seventh": lambda draw: LIMIT // draw.choice([2, 3, 7]) + 1,
}


def mixed(mix: str, count: int) -> list[int]:
    draw = random.Random(0)
    return [MIXES[mix](draw) for _ in range(count)]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("balance", ["tokens", "attention"])
def test_as_few_packs_as_adding_one_at_a_time(mix: str, balance: str) -> None:
    lengths, ranks = mixed(mix, 256), 8
    costs = attention_costs(lengths, linear_size=50_000, attention_size=1) if balance != "tokens" else lengths
    per_rank = -(-sum(lengths) // (LIMIT * ranks))
    while oracle_fill(lengths, costs, per_rank * ranks, LIMIT) is None:
        per_rank += 1
    plan = plan_micro_batches(lengths, ranks=ranks, max_tokens=LIMIT, costs=costs)
    assert len(plan[0]) == per_rank
    loads = [sum(costs[i] for pack in packs for i in pack) for packs in plan]
    assert max(loads) * ranks <= 1.01 * sum(loads)


@pytest.mark.parametrize("mix", MIXES)
def test_thousands_of_sequences_take_well_under_a_second(mix: str) -> None:
    """A tenth of a second and less where this was written; looking at every bin takes minutes."""
    lengths = mixed(mix, 8192)
    costs = attention_costs(lengths, linear_size=50_000, attention_size=1)
    start = time.process_time()
    plan_micro_batches(lengths, ranks=8, max_tokens=LIMIT, costs=costs)
    assert time.process_time() - start < 2
