"""Several sets mixed by weight: shares, one order for any number of ranks, and the same after a resume."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_fspo.config.data import Data
from megatron_fspo.data.cursor import MixedCursor, PromptCursor, make_cursor, mixture, most_at_once
from megatron_fspo.data.walk import PromptWalk
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt

Sets = list[tuple[str, int, float]]
weights = st.one_of(st.integers(1, 9).map(float), st.sampled_from([0.1, 0.25, 0.7, 1 / 3, 1e-3]))


@st.composite
def mixtures(draw: st.DrawFn) -> Sets:
    number = draw(st.integers(1, 4))
    return [(f"set{n}", draw(st.integers(5, 12)), draw(weights)) for n in range(number)]


def batch_sizes(sets: Sets) -> st.SearchStrategy[int]:
    """Those that no set is too small for."""
    fitting = [
        n
        for n in range(1, 12)
        if all(most <= size for most, (_, size, _) in zip(most_at_once(sets, n), sets, strict=True))
    ]
    assume(fitting)
    return st.sampled_from(fitting)


def set_of(index: int, sets: Sets) -> int:
    for number, (_, size, _) in enumerate(sets):
        if index < size:
            return number
        index -= size
    raise AssertionError(f"{index} is in no set")


def shares(sets: Sets) -> list[Fraction]:
    whole = sum(Fraction(str(weight)) for _, _, weight in sets)
    return [Fraction(str(weight)) / whole for _, _, weight in sets]


@given(sets=mixtures(), seed=st.integers(0, 9), shuffle=st.booleans(), data=st.data())
@settings(deadline=None)
def test_every_set_comes_as_often_as_its_weight_says(
    sets: Sets, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    cursor = MixedCursor(sets, seed, shuffle)
    given_out = [0] * len(sets)
    for n in data.draw(st.lists(batch_sizes(sets), min_size=1, max_size=30)):
        batch = cursor.take(n)
        assert len(set(batch)) == len(batch) == n
        numbers = Counter(set_of(index, sets) for index in batch)
        for number, most in enumerate(most_at_once(sets, n)):
            assert numbers[number] <= most
            given_out[number] += numbers[number]
        total = sum(given_out)
        for number, share in enumerate(shares(sets)):
            assert share * total - (len(sets) - 1) < given_out[number] + Fraction(1, 10**9)
            assert given_out[number] < share * total + 1


@given(sets=mixtures(), seed=st.integers(0, 9), data=st.data())
@settings(deadline=None)
def test_which_set_is_next_is_the_one_furthest_behind(sets: Sets, seed: int, data: st.DataObject) -> None:
    """Against the definition in fractions, one prompt at a time."""
    cursor = MixedCursor(sets, seed, shuffle=False)
    counts = [0] * len(sets)
    for position in range(1, 40):
        behind = [share * position - count for share, count in zip(shares(sets), counts, strict=True)]
        (index,) = cursor.take(1)
        number = set_of(index, sets)
        assert behind[number] == max(behind)
        counts[number] += 1


@given(sets=mixtures(), seed=st.integers(0, 9), data=st.data())
@settings(deadline=None)
def test_a_set_is_walked_through_in_whole_epochs(sets: Sets, seed: int, data: st.DataObject) -> None:
    cursor = MixedCursor(sets, seed)
    order = [index for _ in range(120) for index in cursor.take(1)]
    first = 0
    for _, size, _ in sets:
        mine = [index for index in order if first <= index < first + size]
        for start in range(0, len(mine) - size + 1, size):
            assert sorted(mine[start : start + size]) == list(range(first, first + size))
        first += size


@given(
    sets=mixtures(),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    ranks=st.sampled_from([2, 4]),
    data=st.data(),
)
@settings(deadline=None)
def test_ranks_see_disjoint_prompts_that_together_are_the_order_of_one(
    sets: Sets, seed: int, shuffle: bool, ranks: int, data: st.DataObject
) -> None:
    """A rank takes the positions range(rank, n, ranks) of a batch, as the trainer deals them: see
    tests/trainer/test_mixed_prompts.py for the trainer itself."""
    n = data.draw(batch_sizes(sets))
    single = PromptWalk(MixedCursor(sets, seed, shuffle), n)
    each = [PromptWalk(MixedCursor(sets, seed, shuffle), n) for _ in range(ranks)]
    for _ in range(6):
        batch = single.batch()
        dealt = [walk.batch()[rank::ranks] for rank, walk in enumerate(each)]
        assert [len(mine) for mine in dealt] == [len(range(rank, n, ranks)) for rank in range(ranks)]
        together = [dealt[position % ranks][position // ranks] for position in range(n)]
        assert together == batch
        assert sum(len(set(mine)) for mine in dealt) == len(set().union(*dealt)) == n


@given(
    sets=mixtures(),
    shuffle=st.booleans(),
    ahead=st.integers(0, 3),
    further=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    data=st.data(),
)
@settings(deadline=None)
def test_interrupted_at_any_step_and_resumed(
    sets: Sets, shuffle: bool, ahead: int, further: list[int], data: st.DataObject
) -> None:
    """With batches asked for ahead, and further prompts at each step's turn."""
    n = data.draw(batch_sizes(sets))
    cut = data.draw(st.integers(0, len(further)))

    def steps(walk: PromptWalk, first: int, last: int) -> list[list[list[int]]]:
        waiting: list[list[int]] = []
        found = []
        for step in range(first, last):
            while len(waiting) < max(ahead, 1):
                waiting.append(walk.batch())
            walk.close()
            found.append([waiting.pop(0), *(walk.further(min(more, n)) for more in further[step : step + 1])])
            while len(waiting) < ahead:
                waiting.append(walk.batch())
        return found

    whole = steps(PromptWalk(MixedCursor(sets, 3, shuffle), n), 0, len(further))
    stopped = PromptWalk(MixedCursor(sets, 3, shuffle), n)
    assert steps(stopped, 0, cut) == whole[:cut]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = PromptWalk(MixedCursor(sets, 3, shuffle), n)
    resumed.further(1)  # a state is loaded over whatever was there
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert steps(resumed, cut, len(further)) == whole[cut:]


def test_the_order_is_part_of_what_a_checkpoint_promises() -> None:
    cursor = MixedCursor([("a", 4, 3), ("b", 8, 1)], seed=0)
    assert [cursor.take(4) for _ in range(3)] == [
        [5, 2, 1, 3],
        [7, 3, 2, 1],
        [0, 10, 1, 2],
    ]
    plain = MixedCursor([("a", 4, 3), ("b", 8, 1)], seed=0, shuffle=False)
    assert [plain.take(4) for _ in range(3)] == [[0, 1, 4, 2], [3, 0, 5, 1], [2, 3, 6, 0]]
    assert plain.state_dict() == {
        "sets": [{"epoch": 2, "offset": 1, "taken": 9}, {"epoch": 0, "offset": 3, "taken": 3}],
        "seed": 0,
        "shuffle": False,
        "mixed": [
            {"name": "a", "num_prompts": 4, "share": "3/4"},
            {"name": "b", "num_prompts": 8, "share": "1/4"},
        ],
    }


def test_no_rank_gets_a_set_more_than_others() -> None:
    """Half and half, dealt to two ranks: in the schedule's own order each rank would have a set to itself."""
    sets: Sets = [("a", 100, 1), ("b", 100, 1)]
    cursor = MixedCursor(sets, seed=1)
    mine = Counter(set_of(index, sets) for _ in range(200) for index in cursor.take(16)[::2])
    assert abs(mine[0] - mine[1]) < 200


def test_more_at_once_than_a_set_has() -> None:
    cursor = MixedCursor([("a", 3, 1), ("b", 50, 1)], seed=1)
    before = cursor.state_dict()
    with pytest.raises(ValueError, match="4 prompts at once, but a set has only 3"):
        cursor.take(8)
    assert cursor.state_dict() == before
    with pytest.raises(InputError, match="at least one prompt is needed, found 0"):
        MixedCursor([("a", 3, 1), ("b", 0, 1)], seed=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 2}, "the checkpoint has seed = 2, this run 1"),
        ({"mixed": [{"name": "a", "num_prompts": 5, "share": "1"}]}, "the checkpoint has mixed = "),
        ({"sets": []}, "is no place in 2 sets"),
        ({"sets": [{"epoch": 0, "offset": 0}] * 2}, "is no place in 2 sets"),
        ({"sets": [{"epoch": 0, "offset": 0, "taken": -1}] * 2}, "is no place in 2 sets"),
        ({"sets": [{"epoch": 0, "offset": 6, "taken": 1}] * 2}, "offset 6 is no place in 5 prompts"),
        ({"sets": 3}, "3 is no place in 2 sets"),
        ({"epoch": 0}, "the state has the keys"),
    ],
)
def test_a_state_from_elsewhere_is_refused_and_changes_nothing(change: dict[str, Any], told: str) -> None:
    cursor = MixedCursor([("a", 8, 1), ("b", 5, 2)], seed=1)
    cursor.take(3)
    before = cursor.state_dict()
    with pytest.raises(InputError, match=told):
        cursor.load_state_dict({**before, **change})
    assert cursor.state_dict() == before
    walk = PromptWalk(cursor, 2)
    with pytest.raises(InputError, match="no places of batches"):
        walk.load_state_dict({**before, "open": [{"epoch": 0, "offset": 0}]})


def test_a_checkpoint_of_one_set_is_not_one_of_several() -> None:
    one, several = PromptCursor(13, 1), MixedCursor([("a", 8, 1), ("b", 5, 2)], seed=1)
    with pytest.raises(InputError, match="from a run over one set, this run is over several; resume with"):
        several.load_state_dict(one.state_dict())
    with pytest.raises(InputError, match="from a run over several sets, this run is over one; resume with"):
        one.load_state_dict(several.state_dict())


def prompts_of(sizes: dict[str, int]) -> list[Prompt]:
    names = [name for name, size in sizes.items() for _ in range(size)]
    return [
        Prompt(index=n, token_ids=(1,), text="x", answer="1", dataset=name) for n, name in enumerate(names)
    ]


def test_without_weights_every_prompt_weighs_the_same() -> None:
    data = Data.model_validate({"train": [{"file": "a.jsonl"}, {"file": "b.jsonl"}]})
    prompts = prompts_of({"a": 30, "b": 10})
    assert mixture(prompts, data) == [("a", 30, 30.0), ("b", 10, 10.0)]
    cursor = make_cursor(prompts, data, seed=1)
    assert isinstance(cursor, MixedCursor)
    counts = Counter(index for _ in range(40) for index in cursor.take(4))
    assert set(counts.values()) == {4}, "four epochs of both sets"
    weighted = Data.model_validate(
        {"train": [{"file": "a.jsonl", "weight": 1}, {"file": "b.jsonl", "weight": 3}]}
    )
    assert mixture(prompts, weighted) == [("a", 30, 1.0), ("b", 10, 3.0)]


def test_one_set_is_walked_through_as_ever() -> None:
    """So a checkpoint of before there was mixing goes on: its state has these keys."""
    for train in ("a.jsonl", [{"file": "a.jsonl", "weight": 2}]):
        cursor = make_cursor(prompts_of({"a": 10}), Data.model_validate({"train": train}), seed=5)
        assert isinstance(cursor, PromptCursor)
        walk = PromptWalk(cursor, 3)
        older = {"epoch": 1, "offset": 3, "num_prompts": 10, "seed": 5, "shuffle": True}
        walk.load_state_dict({**older, "open": [{"epoch": 1, "offset": 0}]})
        again, new = walk.batch(), walk.batch()
        reference = PromptCursor(10, 5)
        reference.take(10)
        assert [again, new] == [reference.take(3), reference.take(3)]
        walk.close()
        assert walk.state_dict() == {**older, "offset": 6, "open": [{"epoch": 1, "offset": 3}]}
