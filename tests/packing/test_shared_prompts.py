"""Packs whose sequences share prompts, against a reading of the same sequences one by one."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.packing.batch import MicroBatch, Sequences
from megatron_fspo.packing.pack import PackLayout, pack, plan_step

Groups = list[tuple[int, list[int]]]
GROUPS = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=5
)


def sequences_of(groups: Groups) -> Sequences:
    """Prompts of so many tokens with their responses. All ids differ, but those of a prompt; a route says
    which token of which sequence it is of."""
    prompts, responses, routes, fresh = [], [], [], iter(range(1, 10_000))
    for length, lengths in groups:
        prompt = [next(fresh) for _ in range(length)]
        for response in lengths:
            prompts.append(prompt)
            responses.append([next(fresh) for _ in range(response)])
            routes += [[[len(prompts) - 1, at]] for at in range(length + response - 1)]
    return Sequences.of(
        prompts=prompts,
        responses=responses,
        log_probs=[[-0.5 - token for token in row] for row in responses],
        advantages=[0.25 * i for i in range(len(prompts))],
        routes=torch.tensor(routes, dtype=torch.uint8).view(-1, 1, 2),
    )


def whole(sequences: Sequences, number: int) -> list[int]:
    prompt, length, start, _ = sequences.places[number].tolist()
    tokens: list[int] = sequences.tokens[start : start + prompt + length].tolist()
    return tokens


def test_a_prompt_of_three_by_hand() -> None:
    (batch,) = pack(sequences_of([(3, [2, 0]), (1, [1])]), PackLayout(share_prompts=True, multiple_of=5))
    # The prompt 1 2 3 without its last token; 3 4 5; 3; the prompt 6 with 7; the tail.
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 3, 6, 7, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 0, 1, 0, 1]]
    assert batch.labels.tolist() == [2, 3, 4, 5, 0, 0, 7, 0, 0, 0]
    assert [int(flag) for flag in batch.loss_mask] == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert batch.segment.tolist() == [3, 3, 0, 0, 0, 1, 2, 2, 3, 3]
    assert batch.uses.tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 0, 0]
    assert batch.borders.tolist() == [0, 2, 5, 6, 8, 10] and batch.longest == 5
    assert batch.prefixes == ((0, 2, range(2)),)
    assert batch.sampled_log_probs.tolist() == [0, 0, -4.5, -5.5, 0, 0, -7.5, 0, 0, 0]


def visible(batch: MicroBatch) -> list[list[int]]:
    """Rows of each sequence, those that it shares before its own."""
    shared = {n: range(p.start, p.end) for p in batch.prefixes for n in p.sequences}
    own = [(batch.segment == n).nonzero()[:, 0].tolist() for n in range(len(batch.lengths))]
    return [[*shared.get(n, []), *rows] for n, rows in enumerate(own)]


@settings(deadline=None)
@given(
    groups=GROUPS,
    multiple_of=st.sampled_from([1, 4]),
    room=st.sampled_from([None, 12, 20]),
)
def test_every_sequence_is_whole(groups: Groups, multiple_of: int, room: int | None) -> None:
    sequences = sequences_of(groups)
    layout = PackLayout(share_prompts=True, multiple_of=multiple_of, max_tokens=room)
    micro_batches = pack(sequences, layout)
    assert room is None or all(b.uses.count_nonzero() <= room for b in micro_batches)
    micro_batches = micro_batches.with_columns(
        routes=[batch.routes for batch in micro_batches],
        old_log_probs=[batch.position_ids[0] + 100.0 for batch in micro_batches],
    )
    numbers = [n for batch in micro_batches for n in batch.sample_index.tolist()]
    assert sorted(numbers) == [*range(len(sequences.lengths))]
    for batch in micro_batches:
        assert batch.routes is not None and batch.old_log_probs is not None
        assert batch.borders[-1] == batch.tokens.numel() and batch.tokens.numel() % multiple_of == 0
        for number, rows in zip(batch.sample_index.tolist(), visible(batch), strict=True):
            ids = whole(sequences, number)
            assert batch.tokens[0, rows].tolist() == ids
            assert batch.position_ids[0, rows].tolist() == list(range(len(ids))) and batch.longest >= len(ids)
            assert batch.labels[rows[:-1]].tolist() == ids[1:]
            assert (
                batch.labels[rows][batch.loss_mask[rows]].tolist()
                == ids[int(sequences.prompt_lengths[number]) :]
            )
            assert batch.old_log_probs[rows].tolist() == [100.0 + at for at in range(len(ids))]
            # In a prefix the route is that of whoever was the first of it.
            owners, positions = batch.routes[rows[:-1], 0].unbind(1)
            assert positions.tolist() == list(range(len(ids) - 1))
            assert owners[sequences.prompt_lengths[number] - 1 :].eq(number).all()
        assert batch.uses.sum() == sum(map(len, visible(batch)))


@settings(deadline=None)
@given(groups=GROUPS, ranks=st.integers(1, 4), room=st.integers(12, 60), square=st.booleans())
def test_a_plan_keeps_its_promises(groups: Groups, ranks: int, room: int, square: bool) -> None:
    prompts = [number for number, (_, lengths) in enumerate(groups) for _ in lengths]
    prompt_lengths = [prompt for prompt, lengths in groups for _ in lengths]
    lengths = [length for _, lengths in groups for length in lengths]
    costs = (lambda sizes: [size * size for size in sizes]) if square else None
    layout = PackLayout(data_size=ranks, max_tokens=room, share_prompts=True, costs=costs)
    plan, totals = plan_step(prompt_lengths, lengths, layout, prompts=prompts, first=100)
    packs = [[n - 100 for n in numbers] for rank in plan for numbers in rank]
    assert sorted(n for numbers in packs for n in numbers) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1 and totals.num_tokens == sum(lengths)
    for numbers in packs:
        assert numbers == sorted(numbers)
        once = sum(prompt_lengths[next(some)] - 1 for _, some in groupby(numbers, key=lambda n: prompts[n]))
        assert once + sum(lengths[n] + 1 for n in numbers) <= room


def test_a_group_stays_together_unless_it_is_too_large() -> None:
    def packs(ranks: int, groups: int, room: int | None = None) -> list[list[list[int]]]:
        layout = PackLayout(data_size=ranks, max_tokens=room, share_prompts=True)
        some = [n // 4 for n in range(4 * groups)]
        return plan_step([11] * len(some), [9] * len(some), layout, prompts=some)[0]

    assert [len(numbers) for (numbers,) in packs(2, 4)] == [8, 8]
    # 10 + 4 · 10 tokens; two fit 30.
    assert packs(1, 1, room=50) == [[[0, 1, 2, 3]]]
    assert packs(1, 1, room=30) == [[[0, 1], [2, 3]]]
    # One group for two ranks is cut, so that both have work.
    assert [len(numbers) for (numbers,) in packs(2, 1)] == [2, 2]


def test_context_parallel_shares_nothing() -> None:
    with pytest.raises(ValueError):
        PackLayout(context_size=2, share_prompts=True)
