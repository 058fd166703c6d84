"""Intervals: coverage on known populations, closed forms, strata, speed."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from megatron_fspo.evaluation.intervals import Estimate, interval_of_means


def covered(problems: int, samples: int, shape: tuple[float, float], trials: int) -> float:
    """How often the interval holds the mean of a population of problems: Beta chances, Binomial scores."""
    random = np.random.default_rng(problems)
    chances = random.beta(*shape, size=(problems, trials))
    values = random.binomial(samples, chances) / samples
    truth = shape[0] / sum(shape)
    found = (interval_of_means({"s": values[:, [i]]}, seed=i, resamples=1000)[0] for i in range(trials))
    return sum(one.low <= truth <= one.high for one in found) / trials


@pytest.mark.parametrize(("problems", "shape"), [(30, (0.3, 2.0)), (9, (2.0, 1.0)), (100, (2.0, 2.0))])
def test_the_interval_holds_the_truth(problems: int, shape: tuple[float, float]) -> None:
    """Within three standard errors (0.008) of 0.94; the plain percentile interval of 9 is at 0.89."""
    assert 0.915 < covered(problems, 16, shape, 800) < 0.97


def test_to_draw_responses_instead_would_be_far_too_narrow() -> None:
    """A population whose problems are all right or all wrong: 16 samples tell no more than one."""
    values = np.repeat([0.0, 1.0], 20)[:, None]
    (found,) = interval_of_means({"s": values})
    by_problem, by_response = (1.96 * 0.5 / math.sqrt(n) for n in (40, 40 * 16))
    assert found.high - found.value == pytest.approx(by_problem, rel=0.1)
    assert found.high - found.value > 3 * by_response


def test_many_problems_give_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, size=(2000, 1))
    (found,) = interval_of_means({"s": values})
    half = 1.96 * values.std(ddof=1) / math.sqrt(2000)
    assert found.value == pytest.approx(values.mean(), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.04 * half)


def test_a_skewed_interval_leans_to_the_tail() -> None:
    values = np.array([[0.0]] * 27 + [[1.0]] * 3)
    (found,) = interval_of_means({"s": values})
    assert found.high - found.value > 1.2 * (found.value - found.low) > 0


def test_several_sets_count_alike_and_are_drawn_each_for_itself() -> None:
    random = np.random.default_rng(2)
    sets = {"a": random.random((30, 2)), "b": random.random((400, 2)) + 1}
    both = interval_of_means(sets)
    single = {name: interval_of_means({name: values}) for name, values in sets.items()}
    for i in range(2):
        assert both[i].value == pytest.approx((single["a"][i].value + single["b"][i].value) / 2)
        widths = [single[name][i].high - single[name][i].low for name in sets]
        assert both[i].high - both[i].low == pytest.approx(math.hypot(*widths) / 2, rel=0.05)


def test_the_stream_of_a_set_has_its_name() -> None:
    values = np.random.default_rng(3).random((20, 1))
    assert interval_of_means({"a": values}) == interval_of_means({"a": values})
    assert interval_of_means({"a": values}) != interval_of_means({"b": values})
    assert interval_of_means({"a": values}) != interval_of_means({"a": values}, seed=1)
    alone, beside = (
        interval_of_means({"a": table})[0] for table in (values, np.hstack([values, 1 - values]))
    )
    assert alone == beside


def test_where_nothing_can_be_told() -> None:
    assert interval_of_means({"s": np.full((7, 1), 0.7)})[0] == Estimate(value=0.7, low=0.7, high=0.7)
    (lone,) = interval_of_means({"s": np.array([[0.5]])})
    assert lone.value == 0.5 and math.isnan(lone.low) and math.isnan(lone.high)
    for sets in ({}, {"s": np.empty((0, 1))}):
        with pytest.raises(ValueError, match="needs a set"):
            interval_of_means(sets)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).random((50, 3))
    whole = interval_of_means({"s": values}, resamples=500)
    monkeypatch.setattr("megatron_fspo.evaluation.intervals._BLOCK", 50 * 7)
    for one, other in zip(whole, interval_of_means({"s": values}, resamples=500), strict=True):
        assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=1e-12)


def test_five_hundred_problems_take_seconds() -> None:
    values = np.random.default_rng(5).random((500, 20))
    began = time.process_time()
    interval_of_means({"s": values}, resamples=10_000)
    assert time.process_time() - began < 5
