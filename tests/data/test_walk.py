"""Batches and further prompts from one walk, and the same ones after a resume at any point."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.data import PromptCursor
from megatron_fspo.data.walk import PromptWalk
from megatron_fspo.errors import InputError

SIZE = 3


def make(num_prompts: int = 10, shuffle: bool = True, state: dict[str, Any] | None = None) -> PromptWalk:
    walk = PromptWalk(PromptCursor(num_prompts, 5, shuffle), SIZE)
    if state is not None:
        walk.load_state_dict(json.loads(json.dumps(state)))
    return walk


@given(
    num_prompts=st.integers(SIZE, 12),
    shuffle=st.booleans(),
    ahead=st.integers(0, 3),
    further=st.lists(st.lists(st.integers(1, SIZE), max_size=2), min_size=1, max_size=8),
    data=st.data(),
)
def test_a_resumed_walk_gives_what_an_uninterrupted_one_gives(
    num_prompts: int, shuffle: bool, ahead: int, further: list[list[int]], data: st.DataObject
) -> None:
    """As many batches ahead as before; each step takes what it takes further."""

    def steps(walk: PromptWalk, first: int, last: int, waiting: list[list[int]]) -> list[list[list[int]]]:
        found = []
        for step in range(first, last):
            while len(waiting) <= (0 if step == 0 else ahead - 1):
                waiting.append(walk.batch())
            if not waiting:
                waiting.append(walk.batch())
            walk.close()
            found.append([waiting.pop(0), *(walk.further(n) for n in further[step])])
            while len(waiting) < ahead:
                waiting.append(walk.batch())
        return found

    whole = steps(make(num_prompts, shuffle), 0, len(further), [])
    cut = data.draw(st.integers(0, len(further)))
    walk = make(num_prompts, shuffle)
    assert steps(walk, 0, cut, []) == whole[:cut]
    state = walk.state_dict()
    resumed = make(num_prompts, shuffle, state)
    assert resumed.state_dict() == state
    assert steps(resumed, cut, len(further), []) == whole[cut:]
    # Stopped again before it has asked for all that was open.
    if state["open"]:
        twice = make(num_prompts, shuffle, state)
        twice.batch()
        assert twice.state_dict() == state


def test_without_further_prompts_it_is_the_cursor() -> None:
    walk, cursor = make(), PromptCursor(10, 5)
    assert [walk.batch() for _ in range(9)] == [cursor.take(SIZE) for _ in range(9)]


def test_what_a_step_takes_further_goes_on_after_the_batches_taken_ahead() -> None:
    walk = make(shuffle=False)
    assert (walk.batch(), walk.batch(), walk.further(2), walk.batch()) == (
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
        [8, 9, 0],
    )
    walk.close()
    assert walk.state_dict() == {
        **{"epoch": 1, "offset": 1, "num_prompts": 10, "seed": 5, "shuffle": False},
        "open": [{"epoch": 0, "offset": 3}, {"epoch": 0, "offset": 8}],
    }


def test_a_checkpoint_of_before_stands_before_the_oldest_batch() -> None:
    cursor = PromptCursor(10, 5)
    cursor.take(SIZE)
    assert make(state=cursor.state_dict()).batch() == cursor.take(SIZE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 5}, "num_prompts = 5, this run 10"),
        ({"open": [{"epoch": 0}]}, "no places of batches"),
        ({"open": {"epoch": 0, "offset": 1}}, "no places of batches"),
        ({"open": [{"epoch": 0, "offset": 10}]}, "offset 10 is no place in 10 prompts"),
        ({"place": 1}, "the state has the keys .*'place'"),
    ],
)
def test_a_state_from_elsewhere_is_refused(change: dict[str, Any], message: str) -> None:
    walk = make()
    walk.batch()
    with pytest.raises(InputError, match=message):
        make(state={**walk.state_dict(), **change})
