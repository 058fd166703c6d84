"""pass@k and maj@k against every subset and closed forms."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.evaluation.estimators import majority_at, pass_at

ANSWERS = st.sampled_from([None, "a", "b", "c", "d"])
RESPONSES = st.lists(st.tuples(ANSWERS, st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8)


def vote(drawn: Sequence[int], answers: Sequence[Hashable | None], scores: Sequence[float]) -> Fraction:
    """The expected score of what one draw elects, exactly."""
    votes = Counter(answers[i] for i in drawn if answers[i] is not None)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    values = []
    for elected in first:
        own = [Fraction(score) for answer, score in zip(answers, scores, strict=True) if answer == elected]
        values.append(sum(own) / len(own))
    return sum(values, Fraction()) / max(len(values), 1)


def over_all_subsets(k: int, answers: Sequence[Hashable | None], scores: Sequence[float]) -> Fraction:
    subsets = list(itertools.combinations(range(len(answers)), k))
    return sum((vote(drawn, answers, scores) for drawn in subsets), Fraction()) / len(subsets)


@settings(max_examples=60)
@given(responses=RESPONSES, data=st.data())
def test_the_majority_is_the_mean_over_all_subsets(
    responses: list[tuple[str | None, float]], data: st.DataObject
) -> None:
    answers, scores = zip(*responses, strict=True)
    k = data.draw(st.integers(1, len(responses)))
    assert majority_at(k, answers, scores) == pytest.approx(
        float(over_all_subsets(k, answers, scores)), abs=1e-14
    )


@settings(max_examples=60)
@given(responses=RESPONSES, seed=st.randoms())
def test_the_order_of_responses_changes_no_digit(responses: list[tuple[str | None, float]], seed) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(responses)
    seed.shuffle(shuffled)
    for k in range(1, len(responses) + 1):
        found = {majority_at(k, *zip(*rows, strict=True)) for rows in (responses, shuffled)}
        assert len(found) == 1


def test_known_majorities() -> None:
    right, wrong = ("7", 1.0), ("8", 0.0)
    cases = [
        (3, [right, right, wrong], 1.0),
        (2, [right, wrong], 0.5),  # a tie is shared
        (3, [right, wrong, (None, 0.0)], 0.5),  # who has no answer does not vote
        (2, [(None, 0.0), (None, 1.0)], 0.0),  # and nobody's vote is wrong
        (1, [right, wrong, wrong, (None, 0.0)], 0.25),
        (2, [right, wrong, wrong, (None, 0.0)], (0.5 + 0.5 + 1 + 0 + 0 + 0) / 6),
        (2, [("7", 1.0), ("7", 0.0)], 0.5),  # the score is the mean of the answer's responses
    ]
    for k, rows, wanted in cases:
        assert majority_at(k, *zip(*rows, strict=True)) == pytest.approx(wanted, abs=1e-15), (k, rows)


@pytest.mark.parametrize(("n", "k", "c"), [(64, 15, 30), (64, 1, 13), (400, 57, 190), (1100, 1100, 551)])
def test_two_answers_are_a_hypergeometric_tail(n: int, k: int, c: int) -> None:
    """c right ones against one wrong answer."""
    ways = (math.comb(c, i) * math.comb(n - c, k - i) for i in range(k // 2 + 1, k + 1))
    answers, scores = ["r"] * c + ["w"] * (n - c), [1.0] * c + [0.0] * (n - c)
    tie = math.comb(c, k // 2) * math.comb(n - c, k // 2) / 2 if k % 2 == 0 else 0
    right = (sum(ways) + tie) / math.comb(n, k)
    assert majority_at(k, answers, scores) == pytest.approx(right, rel=1e-11)


@settings(max_examples=40)
@given(n=st.integers(1, 9), data=st.data())
def test_pass_is_the_share_of_subsets_with_a_right_one(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
    assert pass_at(k, n, right) == float(Fraction(sum(any(s) for s in subsets), len(subsets)))


@settings(max_examples=60)
@given(n=st.integers(1, 3000), data=st.data())
def test_pass_is_the_nearest_float_for_every_n(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    missed = Fraction(1)
    for i in range(min(k, 40)):  # the product form, as far as it is cheap
        missed *= Fraction(max(n - right - i, 0), n - i)
    if k <= 40:
        assert pass_at(k, n, right) == float(1 - missed)
    assert pass_at(1, n, right) == right / n
    assert (pass_at(k, n, right) == 0) == (right == 0)
