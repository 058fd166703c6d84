"""The walk over the prompts: whole epochs, and the same stream after a resume at any point."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.data import PromptCursor
from megatron_fspo.errors import InputError

sizes = st.integers(1, 12)
seeds = st.integers(0, 2**40)


@given(num_prompts=sizes, seed=seeds, shuffle=st.booleans(), data=st.data())
def test_a_batch_never_holds_a_prompt_twice(
    num_prompts: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    cursor = PromptCursor(num_prompts, seed, shuffle)
    for n in data.draw(st.lists(st.integers(0, num_prompts), max_size=8)):
        batch = cursor.take(n)
        assert len(batch) == len(set(batch)) == n
        assert set(batch) <= set(range(num_prompts))


@given(size=st.integers(1, 6), batches=st.integers(1, 4), seed=seeds, shuffle=st.booleans())
def test_batches_that_divide_an_epoch_hold_every_prompt_once(
    size: int, batches: int, seed: int, shuffle: bool
) -> None:
    cursor = PromptCursor(size * batches, seed, shuffle)
    for _ in range(3):
        epoch = [index for _ in range(batches) for index in cursor.take(size)]
        assert sorted(epoch) == list(range(size * batches))


def test_the_rest_of_a_shuffled_epoch_is_skipped_and_every_prompt_comes() -> None:
    cursor = PromptCursor(10, seed=3)
    cursor.take(8)
    other = PromptCursor(10, seed=3)
    other.take(10)
    assert cursor.take(8) == other.take(8)
    counts = [0] * 10
    for _ in range(200):
        for index in cursor.take(8):
            counts[index] += 1
    assert min(counts) > 120


def test_more_at_once_than_there_are() -> None:
    with pytest.raises(ValueError, match="5 prompts at once, but there are only 4"):
        PromptCursor(4, seed=1).take(5)


@given(num_prompts=sizes, seed=seeds, shuffle=st.booleans(), data=st.data())
def test_resuming_anywhere_gives_the_same_stream(
    num_prompts: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    takes = data.draw(st.lists(st.integers(0, num_prompts), min_size=1, max_size=8))
    stop = data.draw(st.integers(0, len(takes)))
    whole = PromptCursor(num_prompts, seed, shuffle)
    uninterrupted = [whole.take(n) for n in takes]
    stopped = PromptCursor(num_prompts, seed, shuffle)
    assert [stopped.take(n) for n in takes[:stop]] == uninterrupted[:stop]
    state = json.loads(json.dumps(stopped.state_dict()))

    resumed = PromptCursor(num_prompts, seed, shuffle)
    resumed.take(1)  # a state is loaded over whatever was there
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [resumed.take(n) for n in takes[stop:]] == uninterrupted[stop:]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    cursor, again = PromptCursor(50, seed=7), PromptCursor(50, seed=7)
    epochs = [cursor.take(50) for _ in range(3)]
    assert epochs == [again.take(50) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Epoch 1 of seed 7 is not epoch 0 of seed 8, as it would be were the two numbers added.
    assert PromptCursor(50, seed=8).take(50) not in epochs
    assert list(range(50)) not in epochs
    # The order is part of what a checkpoint promises: it must not move with a Python version.
    cursor = PromptCursor(10, seed=0)
    assert cursor.take(10) + cursor.take(10) == [1, 0, 2, 4, 9, 3, 8, 6, 7, 5, 1, 4, 3, 5, 8, 0, 2, 6, 7, 9]


def test_without_shuffle_the_order_is_the_files() -> None:
    cursor = PromptCursor(3, seed=1, shuffle=False)
    assert [cursor.take(2) for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_state_at_an_epochs_end_is_the_next_ones_begin() -> None:
    cursor = PromptCursor(4, seed=2)
    cursor.take(4)
    cursor.take(4)
    assert cursor.state_dict() == {"epoch": 2, "offset": 0, "num_prompts": 4, "seed": 2, "shuffle": True}


STATE = {"epoch": 1, "offset": 2, "num_prompts": 4, "seed": 2, "shuffle": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 5}, "the checkpoint has num_prompts = 5, this run 4"),
        ({"seed": 3}, "the checkpoint has seed = 3, this run 2"),
        ({"shuffle": False}, "the checkpoint has shuffle = False, this run True"),
        ({"offset": 4}, "epoch 1, offset 4 is no place in 4 prompts"),
        ({"offset": -1}, "offset -1 is no place"),
        ({"offset": "2"}, "offset '2' is no place"),
        ({"epoch": -1}, "epoch -1, offset 2 is no place"),
        ({"epoch": 1.5}, "epoch 1.5, offset 2 is no place"),
        ({"place": 1}, "the state has the keys .*'place'"),
    ],
)
def test_a_state_from_elsewhere_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    cursor = PromptCursor(4, seed=2)
    cursor.take(1)
    before = cursor.state_dict()
    with pytest.raises(InputError, match=message):
        cursor.load_state_dict({**STATE, **change})
    assert cursor.state_dict() == before
    cursor.load_state_dict(STATE)
    assert cursor.state_dict() == STATE


def test_a_state_that_lacks_a_key_is_refused() -> None:
    with pytest.raises(InputError, match=r"the state has the keys \['epoch'\], not \['epoch', 'num_prompts'"):
        PromptCursor(4, seed=2).load_state_dict({"epoch": 1})


def test_no_prompts() -> None:
    with pytest.raises(InputError, match="at least one prompt is needed, found 0"):
        PromptCursor(0, seed=0)
