"""Trajectories of several rows in packs, against a reading of their rows one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.packing.pack import PackLayout, pack
from megatron_fspo.packing.zigzag import gathered_positions
from megatron_fspo.types import Completion, Sample
from packs import collate, sample, sequences_of

ROWS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=3)
"""(inserted, written) tokens of a further row."""


def test_two_rows_by_hand() -> None:
    """Prompt 1 2, response 3 4 | 5 6 7 with 5 6 inserted; beside it one that shares the prompt."""
    both = [
        sample([1, 2], [3, 4, 5, 6, 7], loss_mask=[1, 1, 0, 0, 1], row_starts=[2]),
        sample([1, 2], [8]),
    ]
    options = {"num_sequences": 2, "num_tokens": 4, "multiple_of": 5}
    batch = collate(both, [0, 1], share_prompts=True, **options)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 2, 8, 5, 6, 7, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 1, 2, 4, 5, 6, 0]]
    assert batch.row_positions.tolist() == [0, 1, 2, 3, 1, 2, 0, 1, 2, 0]
    assert batch.labels.tolist() == [2, 3, 4, 5, 8, 0, 6, 7, 0, 0]
    assert [int(flag) for flag in batch.loss_mask] == [0, 1, 1, 0, 1, 0, 0, 1, 0, 0]
    assert batch.segment.tolist() == [2, 0, 0, 0, 1, 1, 0, 0, 0, 2]
    assert batch.borders.tolist() == [0, 1, 4, 6, 9, 10] and batch.owner.tolist() == [0, 0, 1, 0, 2]
    assert batch.lengths.tolist() == [3, 1] and batch.longest == 4
    # Each of the two ranks has the outer or the inner quarters of every row.
    first, second = (collate(both, [0, 1], context_rank=r, context_size=2, **options) for r in range(2))
    assert first.tokens.tolist() == [[1, 4, 5, 0, 1, 0, 0, 0, 0, 0]]
    assert second.tokens.tolist() == [[2, 3, 6, 7, 2, 8, 0, 0, 0, 0]]
    assert first.labels[:3].tolist() == [2, 5, 6] and [int(flag) for flag in first.loss_mask[:3]] == [0, 0, 0]
    assert second.row_positions[:6].tolist() == [1, 2, 1, 2, 1, 2]


def rows_of(one: Sample) -> list[list[int]]:
    ids = [*one.prompt.token_ids, *one.completion.token_ids]
    borders = [0, *(len(one.prompt.token_ids) + start for start in one.completion.row_starts), len(ids)]
    return [ids[first:end] for first, end in pairwise(borders)]


def laid_out(parts: list[MicroBatch], column: list[torch.Tensor]) -> torch.Tensor:
    """A column of the whole row, from those of its context-parallel ranks."""
    return torch.cat(column)[gathered_positions(parts[0].borders, len(parts))]


@settings(deadline=None)
@given(
    some=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 5), ROWS, st.integers(1, 3)), min_size=1, max_size=4
    ),
    size=st.integers(1, 3),
    share=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_every_row_is_whole_and_by_itself(
    some: list[tuple[int, int, list[tuple[int, int]], int]], size: int, share: bool, ranks: int
) -> None:
    fresh = iter(range(1, 10_000))
    samples = []
    for prompt, first, further, copies in some:
        ids = [next(fresh) for _ in range(prompt)]
        for _ in range(copies):
            mask, row_starts = [1] * first, []
            for inserted, own in further:
                row_starts.append(len(mask))
                mask += [0] * inserted + [1] * own
            samples.append(sample(ids, [next(fresh) for _ in mask], loss_mask=mask, row_starts=row_starts))
    sequences = sequences_of(samples)
    room = max(
        sum(len(row) + -len(row) % (2 * size) for row in rows_of(one)) + 2 * size * len(rows_of(one))
        for one in samples
    )
    seen = []
    for rank in range(ranks):
        layouts = [
            PackLayout(
                max_tokens=room,
                data_rank=rank,
                data_size=ranks,
                context_rank=part,
                context_size=size,
                share_prompts=share and size == 1,
            )
            for part in range(size)
        ]
        for parts in zip(*(pack(sequences, layout) for layout in layouts), strict=True):
            assert parts[0].borders[-1] <= room + 2 * size
            columns = ("labels", "loss_mask", "segment", "row_positions", "sampled_log_probs")
            tokens, labels, mask, segment, positions, sampled = (
                laid_out([*parts], [getattr(part, name) for part in parts])
                if name
                else laid_out([*parts], [part.tokens[0] for part in parts])
                for name in ("", *columns)
            )
            borders = parts[0].borders.tolist()
            begins = {
                number: [
                    b for b, owner in zip(borders, parts[0].owner.tolist(), strict=False) if owner == number
                ]
                for number in range(len(parts[0].lengths))
            }
            for number, index in enumerate(parts[0].sample_index.tolist()):
                seen.append(index)
                one = samples[index]
                ids = [*one.prompt.token_ids, *one.completion.token_ids]
                shared = [p for p in parts[0].prefixes if number in p.sequences]
                starts = [b for b in begins[number] if not any(p.start == b for p in shared)]
                rows = rows_of(one)
                for row, start in zip(rows, starts, strict=True):
                    skipped = shared[0].end - shared[0].start if shared and row is rows[0] else 0
                    places = slice(start, start + len(row) - skipped)
                    assert tokens[places].tolist() == row[skipped:]
                    assert positions[places].tolist() == list(range(skipped, len(row)))
                    assert (segment[places] == number).all()
                kept = mask & (segment == number)
                own = [i for i, own in enumerate(one.completion.loss_mask) if own]
                assert sorted(labels[kept].tolist()) == sorted(one.completion.token_ids[i] for i in own)
                assert sorted(sampled[kept].tolist()) == sorted(-0.5 - i for i in own)
                assert len(ids) == sum(map(len, rows))
    assert sorted(seen) == list(range(len(samples))), "a trajectory is whole in one pack of one rank"


@pytest.mark.parametrize("start", [-1, 0, 3])
def test_a_row_begins_with_an_inserted_token(start: int) -> None:
    with pytest.raises(ValueError, match="row_starts"):
        Completion(
            token_ids=range(3),
            log_probs=[0.0] * 3,
            loss_mask=(1, 1, 0),
            row_starts=(start,),
            finish_reason="stop",
            weight_version=0,
        )
