"""Which rank holds which token, and packs cut that way."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.packing.zigzag import gathered_positions, local_positions
from megatron_fspo.types import Sample
from packs import collate, sample


def test_two_sequences_on_two_ranks_by_hand() -> None:
    """Chunks of 1 and of 2 tokens: rank 0 has the first and the last of each sequence, rank 1 the middle."""
    borders = torch.tensor([0, 4, 12])
    assert local_positions(borders, 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert local_positions(borders, 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    assert gathered_positions(borders, 2).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]


@given(chunks=st.lists(st.integers(1, 5), max_size=6), size=st.integers(1, 6))
def test_every_token_is_on_one_rank_and_gathers_back(chunks: list[int], size: int) -> None:
    borders = [0, *accumulate(2 * size * chunk for chunk in chunks)]
    whole = torch.tensor(borders)
    rows = [local_positions(whole, rank, size).tolist() for rank in range(size)]
    assert sorted(position for row in rows for position in row) == list(range(borders[-1]))
    assert {len(row) for row in rows} == {borders[-1] // size}
    laid = [position for row in rows for position in row]
    assert [laid[place] for place in gathered_positions(whole, size)] == list(range(borders[-1]))


@given(chunk=st.integers(1, 9), size=st.integers(2, 6))
def test_causal_work_is_the_same_on_every_rank(chunk: int, size: int) -> None:
    """Token p attends to p + 1 keys."""
    work = {
        int((local_positions(torch.tensor([0, 2 * size * chunk]), rank, size) + 1).sum())
        for rank in range(size)
    }
    assert len(work) == 1


def test_a_length_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 6 tokens does not split into 4 chunks"):
        local_positions(torch.tensor([0, 6]), 0, 2)


def make(prompt: int, response: int, start: int) -> Sample:
    """One whose token ids count from ``start``."""
    return sample(range(start, start + prompt), range(start + prompt, start + prompt + response))


def pack(samples: list[Sample], rank: int, size: int, multiple_of: int = 1) -> MicroBatch:
    return collate(
        samples,
        range(len(samples)),
        num_sequences=9,
        num_tokens=99,
        context_rank=rank,
        context_size=size,
        multiple_of=multiple_of,
    )


shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=5)


@given(shapes=shapes, size=st.integers(2, 4), multiple_of=st.integers(1, 4))
def test_the_ranks_of_a_pack_hold_each_response_token_once(
    shapes: list[tuple[int, int]], size: int, multiple_of: int
) -> None:
    """Sequence, position, label and sampled log-prob of all inside the mask: as without context parallel."""
    samples = [make(prompt, response, 100 * (i + 1)) for i, (prompt, response) in enumerate(shapes)]

    def tokens(batch: MicroBatch) -> list[tuple[int, int, int, float]]:
        inside = batch.loss_mask
        columns = (batch.segment, batch.position_ids[0], batch.labels, batch.sampled_log_probs)
        return list(zip(*(column[inside].tolist() for column in columns), strict=True))

    whole = pack(samples, 0, 1)
    parts = [pack(samples, rank, size, multiple_of) for rank in range(size)]
    assert sorted(token for part in parts for token in tokens(part)) == sorted(tokens(whole))
    for rank, part in enumerate(parts):
        count = part.labels.numel()
        assert count % multiple_of == 0 and count * size == part.borders[-1]
        assert part.tokens.shape == part.position_ids.shape == (1, count)
        assert torch.equal(part.borders, parts[0].borders) and torch.equal(part.lengths, whole.lengths)
        assert ((part.borders[1:] - part.borders[:-1]) % (2 * size) == 0).all()
        assert part.longest == int((part.borders[1:] - part.borders[:-1]).max())
        assert (part.segment[~part.loss_mask & (part.tokens[0] == 0)] == len(samples)).all()
        # Positions run through each sequence and on into its padding, as the zigzag has them.
        starts = part.borders[:-1].tolist()
        where = local_positions(part.borders, rank, size)
        begin = torch.tensor([max(s for s in starts if s <= w) for w in where.tolist()])
        assert torch.equal(part.position_ids[0], where - begin)
