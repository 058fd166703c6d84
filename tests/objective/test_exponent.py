"""The exponent of S: found where it is known, its interval held to its level, refused where it has none."""

import math

import pytest
import torch
from random_walks import walks
from torch import Tensor

from megatron_fspo.objective.calibration import QUANTILE, fit_exponent, measure_exponent, student_t


def steps(size: int, count: int) -> Tensor:
    return torch.arange(size) * count // size


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0])
def test_fit_exponent_finds_the_exponent(exponent: float) -> None:
    assert fit_exponent(*walks(20_000, 0.02, exponent)) == pytest.approx(exponent, abs=0.02)


def test_fit_exponent_is_exact_on_a_power_law_and_nan_without_two_bins() -> None:
    lengths = torch.tensor([4, 16, 64, 256]).repeat(3)
    assert fit_exponent(3 * lengths.double() ** 0.3, lengths, num_bins=4) == pytest.approx(0.3)
    # A bin without spread says nothing of the slope.
    s = torch.where(lengths == 4, 0.0, 3 * lengths.double() ** 0.3)
    assert fit_exponent(s, lengths, num_bins=4) == pytest.approx(0.3)
    assert math.isnan(fit_exponent(torch.ones(5), torch.full((5,), 7)))
    assert math.isnan(fit_exponent(torch.zeros(12), lengths))
    assert math.isnan(fit_exponent(torch.zeros(0), torch.zeros(0)))


def test_what_is_not_finite_or_empty_is_left_out() -> None:
    s, lengths = walks(200, 0.02)
    bad = torch.tensor([math.nan, math.inf, -math.inf, 5.0], dtype=torch.float64)
    more, longer = torch.cat([s, bad]), torch.cat([lengths, torch.tensor([9, 9, 9, 0])])
    assert fit_exponent(more, longer) == fit_exponent(s, lengths)
    blocks = steps(200, 4)
    measured = measure_exponent(more, longer, torch.cat([blocks, blocks[:4]]))
    assert measured == measure_exponent(s, lengths, blocks)


def test_the_spread_is_a_quantile_by_hand() -> None:
    """Bins of 5; |S| of the longer ones are 8 times those of the shorter, L is 4 times theirs."""
    short = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5], dtype=torch.float64)
    s, lengths = torch.cat([short, 8 * short]), torch.tensor([10] * 5 + [40] * 5)
    assert fit_exponent(s, lengths, num_bins=2) == pytest.approx(1.5)
    # One huge outlier a bin is above the quantile and changes nothing.
    s[[4, 9]] = 1e6
    assert fit_exponent(s, lengths, num_bins=2) == pytest.approx(1.5)
    assert 0.5 < QUANTILE < 0.85


@pytest.mark.parametrize("shared", [0.0, 0.02])
def test_the_interval_holds_the_exponent_about_as_often_as_it_says(shared: float) -> None:
    """Also where all sequences of a step are scaled by something in common, as those of one update are."""
    held, trials = 0, 200
    for seed in range(trials):
        s, lengths = walks(1024, 0.02, 0.6, seed=seed)
        blocks = steps(1024, 8)
        generator = torch.Generator().manual_seed(10_000 + seed)
        common = torch.randn(8, generator=generator, dtype=torch.float64)
        s = s + shared * common[blocks] * lengths.double() ** 0.6
        low, high = measure_exponent(s, lengths, blocks).interval
        held += low <= 0.6 <= high
    assert 0.88 < held / trials <= 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, n, b: (s, n, b.clamp(max=1)), "2 independent groups of sequences"),
        (lambda s, n, b: (s * 0, n, b), "0 sequences with S other than 0; 64 are needed"),
        (lambda s, n, b: (s, n * 0 + 50, b), "span too little: 1 bins"),
        (lambda s, n, b: (s, n % 100 + 100, b), r"the longest 1\.\d+ times the shortest"),
    ],
)
def test_what_says_nothing_of_growth_is_refused(change, words: str) -> None:
    s, lengths = walks(400, 0.02)
    with pytest.raises(ValueError, match=words):
        measure_exponent(*change(s, lengths, steps(400, 4)))


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)]
)
def test_students_t_is_that_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=0.01)
