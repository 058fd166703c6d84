"""Intervals: coverage on known populations, closed forms, strata, speed."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from benchmarks.noise_check import difference_interval
from megatron_fspo.evaluation.intervals import (
    Estimate,
    interval_of_means,
    jackknife_interval,
    resample_groups,
    t_half_width,
    wilson_interval,
)


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
    """Within three standard errors (0.007) of 0.95; the plain percentile interval of 9 is at 0.89."""
    assert 0.93 < covered(problems, 16, shape, 800) < 0.985


def test_the_interval_of_a_gain_that_few_problems_make_holds_it() -> None:
    """Within three standard errors (0.007) of 0.96; BCa alone, widened by √(P/(P − 1)), is at 0.90."""
    random = np.random.default_rng(6)
    chances, learned = random.beta(2, 1, size=(9, 800)), random.beta(0.3, 2, size=(9, 800))
    after = random.binomial(16, chances + (1 - chances) * learned)
    gains = (after - random.binomial(16, chances)) / 16
    found = [interval_of_means({"s": gains[:, [i]]}, seed=i, resamples=1000)[0] for i in range(800)]
    assert sum(one.low <= 0.3 / 2.3 / 3 <= one.high for one in found) / 800 > 0.935
    ends = zip(gains.min(0), found, gains.max(0), strict=True)
    assert all(low <= one.low <= one.high <= high for low, one, high in ends)
    # Two sets: Welch and Satterthwaite's degrees of freedom are those of the set that varies.
    (both,) = interval_of_means({"a": np.arange(5.0)[:, None], "b": np.ones((50, 1))})
    (alone,) = interval_of_means({"a": np.arange(5.0)[:, None]})
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2)


def test_resampled_groups_cover_and_know_that_responses_to_one_prompt_are_alike() -> None:
    """Where all of a prompt's responses are the same, eight of them say no more than one."""
    lengths, hits, widths = torch.full((160,), 25), 0, []
    groups = torch.arange(20).repeat_interleave(8)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        sums = torch.randn(20, generator=generator, dtype=torch.float64).repeat_interleave(8)
        (one,) = resample_groups(lambda s, n: [s.mean().item()], sums, lengths, groups, resamples=200)
        assert one.value == sums.mean().item()
        hits += one.low <= 0.0 <= one.high
        widths.append(one.high - one.low)
    assert 50 <= hits <= 60
    assert sum(widths) / 60 == pytest.approx(2 * 1.96 / math.sqrt(20), rel=0.15)
    assert resample_groups(lambda s, n: [s.mean().item()], sums, lengths, groups, resamples=200) == [one]
    (one,) = resample_groups(lambda s, n: [1.0], torch.ones(3), torch.ones(3), torch.zeros(3).long())
    assert one.value == 1.0 and math.isnan(one.low) and math.isnan(one.high)


def test_closed_forms() -> None:
    z2 = 1.96**2
    none, half = wilson_interval(0.0, 10), wilson_interval(0.5, 100)
    assert (none.low, none.high) == pytest.approx((0.0, z2 / (10 + z2)))
    assert (half.low + half.high) / 2 == pytest.approx(0.5)
    assert half.high - 0.5 == pytest.approx(1.96 * math.sqrt(0.25 / (100 + z2)))
    # Newcombe's table II, method 10, example (a): 56/70 less 48/80.
    gap = difference_interval(wilson_interval(56 / 70, 70), wilson_interval(48 / 80, 80))
    assert (gap.low, gap.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert t_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(t_half_width([5.0]))
    # The jackknife of a mean is its standard error.
    left = jackknife_interval(2.0, [2.5, 2.0, 1.5])
    assert left.high - 2.0 == pytest.approx(2.0 - left.low) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


def test_many_problems_give_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, size=(2000, 1))
    (found,) = interval_of_means({"s": values})
    half = 1.96 * values.std(ddof=1) / math.sqrt(2000)
    assert found.value == pytest.approx(values.mean(), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.04 * half)
    (found,) = interval_of_means({"s": np.array([[0.0]] * 27 + [[1.0]] * 3)})
    assert found.high - found.value > 1.2 * (found.value - found.low) > 0, "it leans to the longer tail"


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
        with pytest.raises(ValueError, match="needs at least one set"):
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
