"""The order of the prompts: epochs, sets mixed by weight, and the same stream after a resume at any point."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_fspo.config.data import Data
from megatron_fspo.data.cursor import PromptCursor, digest_prompts, mixture, most_at_once
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt

Sets = list[tuple[str, int, float]]
weights = st.one_of(st.integers(1, 9).map(float), st.sampled_from([0.1, 0.25, 0.7, 1 / 3, 1e-3]))
seeds = st.integers(0, 2**40)


def one(prompts: int, seed: int = 0, *, shuffle: bool = True, size: int = 1) -> PromptCursor:
    return PromptCursor([("a", prompts, 1.0)], seed, size=size, shuffle=shuffle)


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


@given(size=st.integers(1, 6), batches=st.integers(1, 4), seed=seeds, shuffle=st.booleans())
def test_batches_that_divide_an_epoch_hold_every_prompt_once(
    size: int, batches: int, seed: int, shuffle: bool
) -> None:
    cursor = one(size * batches, seed, shuffle=shuffle, size=size)
    for _ in range(3):
        epoch = [index for _ in range(batches) for index in cursor.batch()]
        assert sorted(epoch) == list(range(size * batches))


def test_the_rest_of_a_shuffled_epoch_is_skipped_and_every_prompt_comes() -> None:
    cursor, other = one(10, seed=3, size=8), one(10, seed=3)
    cursor.batch()
    other.further(10)
    assert cursor.batch() == other.further(8)
    counts = Counter(index for _ in range(200) for index in cursor.batch())
    assert len(counts) == 10 and min(counts.values()) > 120


def test_the_order_is_part_of_what_a_checkpoint_promises() -> None:
    """It must not move with a Python version."""
    cursor = one(10, size=10)
    # Epoch 0 of seed 1 is not epoch 1 of seed 0, as it would be were the two numbers added.
    assert one(10, seed=1).further(10) != [1, 4, 3, 5, 8, 0, 2, 6, 7, 9]
    assert cursor.batch() + cursor.batch() == [1, 0, 2, 4, 9, 3, 8, 6, 7, 5, 1, 4, 3, 5, 8, 0, 2, 6, 7, 9]
    sets: Sets = [("a", 4, 3), ("b", 8, 1)]
    mixed = PromptCursor(sets, seed=0, size=4)
    assert [mixed.batch() for _ in range(3)] == [[5, 2, 1, 3], [7, 3, 2, 1], [0, 10, 1, 2]]
    plain = PromptCursor(sets, seed=0, size=4, shuffle=False)
    assert [plain.batch() for _ in range(3)] == [[0, 1, 4, 2], [3, 0, 5, 1], [2, 3, 6, 0]]
    plain.close()
    assert plain.state_dict() == {
        "sets": [["a", 4, "3/4"], ["b", 8, "1/4"]],
        "seed": 0,
        "shuffle": False,
        "rows": "",
        "position": [[2, 1, 9], [0, 3, 3]],
        "open": [[[0, 3, 3], [0, 1, 1]], [[1, 2, 6], [0, 2, 2]]],
    }


def test_further_prompts_go_on_after_the_batches_taken_ahead() -> None:
    cursor = one(10, shuffle=False, size=3)
    taken = (cursor.batch(), cursor.batch(), cursor.further(2), cursor.batch())
    assert taken == ([0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 0])


@given(sets=mixtures(), seed=st.integers(0, 9), shuffle=st.booleans(), data=st.data())
@settings(deadline=None)
def test_every_set_comes_as_often_as_its_weight_says(
    sets: Sets, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    cursor = PromptCursor(sets, seed, size=1, shuffle=shuffle)
    given_out = [0] * len(sets)
    for n in data.draw(st.lists(batch_sizes(sets), min_size=1, max_size=30)):
        batch = cursor.further(n)
        assert len(set(batch)) == len(batch) == n
        numbers = Counter(set_of(index, sets) for index in batch)
        for number, most in enumerate(most_at_once(sets, n)):
            assert numbers[number] <= most
            given_out[number] += numbers[number]
        total = sum(given_out)
        for number, share in enumerate(shares(sets)):
            assert share * total - (len(sets) - 1) < given_out[number] + Fraction(1, 10**9)
            assert given_out[number] < share * total + 1


@given(sets=mixtures(), seed=st.integers(0, 9))
@settings(deadline=None)
def test_which_set_is_next_is_the_one_furthest_behind(sets: Sets, seed: int) -> None:
    """Against the definition in fractions, one prompt at a time; and each set comes in whole epochs."""
    cursor = PromptCursor(sets, seed, size=1)
    counts = [0] * len(sets)
    order = []
    for position in range(1, 121):
        behind = [share * position - count for share, count in zip(shares(sets), counts, strict=True)]
        order += cursor.batch()
        number = set_of(order[-1], sets)
        assert behind[number] == max(behind)
        counts[number] += 1
    first = 0
    for _, size, _ in sets:
        mine = [index for index in order if first <= index < first + size]
        for start in range(0, len(mine) - size + 1, size):
            assert sorted(mine[start : start + size]) == list(range(first, first + size))
        first += size


@given(
    sets=mixtures(),
    shuffle=st.booleans(),
    ahead=st.integers(0, 3),
    further=st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=8),
    data=st.data(),
)
@settings(deadline=None)
def test_interrupted_at_any_step_and_resumed(
    sets: Sets, shuffle: bool, ahead: int, further: list[list[int]], data: st.DataObject
) -> None:
    """With batches asked for ahead, and further prompts at each step's turn."""
    n = data.draw(batch_sizes(sets))
    cut = data.draw(st.integers(0, len(further)))

    def make(state: dict[str, Any] | None = None) -> PromptCursor:
        cursor = PromptCursor(sets, 3, size=n, shuffle=shuffle)
        if state is not None:
            cursor.further(1)  # a state is loaded over whatever was there
            cursor.load_state_dict(json.loads(json.dumps(state)))
            assert cursor.state_dict() == state
        return cursor

    def steps(cursor: PromptCursor, part: Sequence[list[int]]) -> list[list[list[int]]]:
        waiting: list[list[int]] = []
        taken = []
        for more in part:
            while len(waiting) < max(ahead, 1):
                waiting.append(cursor.batch())
            cursor.close()
            taken.append([waiting.pop(0), *(cursor.further(min(count, n)) for count in more)])
            while len(waiting) < ahead:
                waiting.append(cursor.batch())
        return taken

    whole = steps(make(), further)
    stopped = make()
    assert steps(stopped, further[:cut]) == whole[:cut]
    state = stopped.state_dict()
    assert steps(make(state), further[cut:]) == whole[cut:]
    if state["open"]:  # stopped again before it has asked for all that was open
        twice = make(state)
        twice.batch()
        assert twice.state_dict() == state


def test_no_rank_gets_a_set_more_than_others() -> None:
    """Half and half, dealt to two ranks: in the schedule's own order each rank would have a set to itself."""
    sets: Sets = [("a", 100, 1), ("b", 100, 1)]
    cursor = PromptCursor(sets, seed=1, size=16)
    mine = Counter(set_of(index, sets) for _ in range(200) for index in cursor.batch()[::2])
    assert abs(mine[0] - mine[1]) < 200


def test_more_at_once_than_a_set_has() -> None:
    cursor = PromptCursor([("a", 3, 1), ("b", 50, 1)], seed=1, size=8)
    before = cursor.state_dict()
    with pytest.raises(ValueError, match="4 prompts at once from a set of 3"):
        cursor.further(8)
    assert cursor.state_dict() == before
    with pytest.raises(InputError, match="data set 'b' has no prompts"):
        PromptCursor([("a", 3, 1), ("b", 0, 1)], seed=1, size=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "the checkpoint has seed = 2, but this run has 1"),
        ({"rows": "another"}, "the checkpoint has rows = 'another', but this run has"),
        ({"shuffle": False}, "the checkpoint has shuffle = False, but this run has True"),
        ({"sets": [["a", 13, "1"]]}, r"the checkpoint has sets = \[\['a', 13, '1'\]\], but this run has"),
        ({"position": []}, "invalid position"),
        ({"position": [[0, 0]] * 2}, "invalid position"),
        ({"position": [[0, 0, -1]] * 2}, "invalid position"),
        ({"position": [[1.5, 0, 0]] * 2}, "invalid position"),
        ({"position": [[0, 5, 5]] * 2}, "invalid position"),
        ({"open": [[0, 0, 0]]}, "invalid position"),
        ({"epoch": 0}, "the state has keys"),
    ],
)
def test_a_state_from_elsewhere_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    cursor = PromptCursor([("a", 8, 1), ("b", 5, 2)], seed=1, size=3)
    cursor.batch()
    before = cursor.state_dict()
    with pytest.raises(InputError, match=message):
        cursor.load_state_dict({**before, **change})
    assert cursor.state_dict() == before


def test_other_texts_or_answers_have_another_digest() -> None:
    rows = [("1+1", "2"), ("1+2", "3")]
    others = [rows[::-1], rows[:1], [("1+1", "2"), ("1+2", "4")], [("1+1", "2"), ("2+1", "3")]]
    digests = [
        digest_prompts([Prompt(index=0, token_ids=(1,), text=text, answer=answer) for text, answer in some])
        for some in [rows, rows, *others]
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 5
    saved, resumed = (PromptCursor([("a", 2, 1.0)], 1, size=1, rows=rows) for rows in digests[1:3])
    with pytest.raises(InputError, match="the checkpoint has rows = "):
        resumed.load_state_dict(saved.state_dict())


def test_without_weights_every_prompt_weighs_the_same() -> None:
    names = ["a"] * 30 + ["b"] * 10
    prompts = [
        Prompt(index=n, token_ids=(1,), text="x", answer="1", dataset=name) for n, name in enumerate(names)
    ]
    files = [{"file": "a.jsonl"}, {"file": "b.jsonl"}]
    sets = mixture(prompts, Data.model_validate({"train": files}))
    assert sets == [("a", 30, 30.0), ("b", 10, 10.0)]
    cursor = PromptCursor(sets, seed=1, size=4)
    counts = Counter(index for _ in range(40) for index in cursor.batch())
    assert set(counts.values()) == {4}, "four epochs of both sets"
    weighted = [{**file, "weight": weight} for file, weight in zip(files, (1, 3), strict=True)]
    assert mixture(prompts, Data.model_validate({"train": weighted})) == [("a", 30, 1.0), ("b", 10, 3.0)]
