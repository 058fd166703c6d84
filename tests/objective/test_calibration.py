"""The noise of S, its drift and its exponent, found where they are known; the calibrator."""

import math

import pytest
import torch
from torch import Tensor

from megatron_fspo.mcore.model.policy_loss import k3_kl
from megatron_fspo.objective.calibration import (
    QUANTILE,
    BandCalibrator,
    centred_sigma,
    expected_drift,
    fit_exponent,
    measure_exponent,
    sigma_hat,
    student_t,
)


def walks(size: int, sigma: float, exponent: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """S ~ Normal(0, (σ·L^a)²) for L from 8 to 4,096, evenly in log L."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (8 * 512 ** torch.rand(size, generator=generator)).long()
    noise = torch.randn(size, dtype=torch.float64, generator=generator)
    return sigma * lengths.double() ** exponent * noise, lengths


@pytest.mark.parametrize(("sigma", "exponent"), [(0.02, 0.5), (0.3, 0.25), (0.004, 0.75)])
def test_sigma_hat_finds_sigma(sigma: float, exponent: float) -> None:
    s, lengths = walks(8000, sigma, exponent)
    assert sigma_hat(s, lengths, exponent) == pytest.approx(sigma, rel=0.04)
    assert sigma_hat(s.float(), lengths, exponent) == pytest.approx(sigma, rel=0.04)


def test_sigma_hat_by_hand() -> None:
    s, lengths = torch.tensor([1.0, -2.0, 3.0, -40.0]), torch.tensor([1, 4, 9, 16])
    # |S|/√L = 1, 1, 1, 10; |S|/L = 1, .5, .333, 2.5, whose median is .75.
    assert sigma_hat(s, lengths) == pytest.approx(1 / 0.67449, rel=1e-5)
    assert sigma_hat(s, lengths, exponent=1.0) == pytest.approx(0.75 / 0.67449, rel=1e-5)


def test_what_is_not_finite_or_empty_is_left_out() -> None:
    s, lengths = walks(50, 0.02)
    bad = torch.tensor([math.nan, math.inf, -math.inf, 5.0], dtype=torch.float64)
    more, longer = torch.cat([s, bad]), torch.cat([lengths, torch.tensor([9, 9, 9, 0])])
    assert sigma_hat(more, longer) == sigma_hat(s, lengths)
    with pytest.raises(ValueError, match="no finite S with L > 0 among 4 sequences"):
        sigma_hat(bad, torch.tensor([9, 9, 9, 0]))


def test_k3_estimates_the_kl_of_two_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 50, dtype=torch.float64, generator=generator).mul(0.3).log_softmax(1)
    kl = (old.exp() * (old - new)).sum().item()
    tokens = torch.multinomial(old.exp(), 200_000, replacement=True, generator=generator)
    total, count = k3_kl((new - old)[tokens], torch.ones(200_000, dtype=torch.bool))
    assert count == 200_000 and kl > 0.05
    assert (total / count).item() == pytest.approx(kl, rel=0.02)


def test_k3_is_exact_for_small_ratios_and_ignores_what_is_masked_or_broken() -> None:
    x = torch.full((4,), 1e-6, dtype=torch.float32)
    total, count = k3_kl(x, torch.ones(4, dtype=torch.bool))
    assert (total / count).item() == pytest.approx(5e-13, rel=1e-3, abs=0)

    log_ratio = torch.tensor([math.log(2.0), -math.log(2.0), math.nan, 9.0, math.inf, -math.inf, 0.0])
    mask = torch.tensor([True, True, True, False, True, True, True])
    total, count = k3_kl(log_ratio, mask)
    # 2 − 1 − log 2 and 1/2 − 1 + log 2 add up to a half.
    assert total.item() == pytest.approx(0.5) and count.item() == 3
    log_ratio[3] = math.nan
    assert k3_kl(log_ratio, mask)[0].item() == pytest.approx(0.5)
    assert [value.item() for value in k3_kl(log_ratio, torch.zeros(7, dtype=torch.bool))] == [0.0, 0.0]


def test_the_drift_of_a_normal_s_is_its_mean() -> None:
    assert expected_drift(0.1) == pytest.approx(-0.005)
    assert math.copysign(1, expected_drift(0.0)) == 1
    lengths = torch.randint(10, 30_000, (20_000,), generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for shift in (0.0, 0.001, -0.05):  # σ̂ is around the drift that S has, from learning or not
        sums = 0.03 * lengths.sqrt() * noise + (expected_drift(0.03) + shift) * lengths
        assert centred_sigma(sums, lengths) == pytest.approx(0.03, rel=0.02)
    assert sigma_hat(sums, lengths) > 0.1
    with pytest.raises(ValueError, match="no finite S"):
        centred_sigma(sums * math.nan, lengths)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: BandCalibrator(mini_batches=0), "mini_batches"),
        (lambda: BandCalibrator(multiple=0.0), "multiple"),
        (lambda: BandCalibrator(exponent=1.5), "exponent"),
    ],
)
def test_a_value_out_of_range_is_named(call, name) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        call()


def test_the_calibrator_measures_until_two_windows_agree_and_freezes() -> None:
    """Adam's first updates: S is ten times as wide as later, and so would be a band of one window."""
    calibrator = BandCalibrator(mini_batches=2, multiple=2.5)
    sigmas = (0.2, 0.1, 0.03, 0.02, 0.02, 0.022, 0.021, 0.02)
    batches = [walks(200, sigma, seed=seed) for seed, sigma in enumerate(sigmas)]

    def width(first: int, last: int) -> float:
        pooled = [torch.cat(column) for column in zip(*batches[first:last], strict=True)]
        return 2.5 * sigma_hat(*pooled)

    # c after each mini-batch: unknown, then that of the last window while σ̂ falls.
    expected = [None, width(0, 2), width(0, 2), width(2, 4), width(2, 4), width(2, 6), width(2, 6)]
    for number, (s, lengths) in enumerate(batches[:7]):
        calibrator.observe(s, lengths)
        calibrator.observe(torch.full_like(s, math.nan), lengths)  # nothing to measure: not a mini-batch
        assert calibrator.c == (expected[number] and pytest.approx(expected[number], rel=1e-12))
        assert calibrator.steady == (number >= 5)
    frozen = calibrator.c
    assert 1.5 < frozen / 0.021 < 3
    calibrator.observe(*walks(200, 1.0, seed=9))
    calibrator.observe(torch.zeros(5), torch.ones(5))
    assert calibrator.c == frozen


def test_until_it_is_steady_the_width_only_falls() -> None:
    """A width that followed σ̂ upwards would be a controller that feeds back on itself."""
    calibrator = BandCalibrator(mini_batches=1)
    widths = []
    for seed, sigma in enumerate((0.02, 0.01, 0.04, 0.01, 0.04)):
        calibrator.observe(*walks(400, sigma, seed=seed))
        assert calibrator.c is not None and not calibrator.steady
        widths.append(calibrator.c)
    assert widths == sorted(widths, reverse=True)
    calibrator.observe(*walks(400, 0.04, seed=5))
    assert calibrator.steady and calibrator.c == pytest.approx(0.08, rel=0.1)


@pytest.mark.parametrize("true", [0.3, 0.7, 1.2])
def test_the_calibrator_measures_its_exponent_within_bounds(true: float) -> None:
    calibrator = BandCalibrator(mini_batches=4, exponent="measured")
    batches = [walks(400, 0.02, true, seed=seed) for seed in range(8)]
    for s, lengths in batches:
        assert not calibrator.steady and calibrator.exponent == 0.5
        calibrator.observe(s, lengths)
    assert calibrator.measured is not None and calibrator.refusal is None
    assert calibrator.measured.value == pytest.approx(true, abs=0.06)
    assert calibrator.exponent == min(max(calibrator.measured.value, 0.5), 1.0)
    pooled = [torch.cat(column) for column in zip(*batches, strict=True)]
    assert calibrator.c == pytest.approx(2 * sigma_hat(*pooled, calibrator.exponent), rel=1e-12)


def test_a_calibrator_whose_lengths_say_nothing_keeps_the_papers_exponent() -> None:
    calibrator = BandCalibrator(mini_batches=3, exponent="measured")
    lengths = torch.arange(100, 200)
    for seed in range(6):
        calibrator.observe(walks(100, 0.02, seed=seed)[0], lengths)
    assert calibrator.steady and calibrator.exponent == 0.5 and calibrator.measured is None
    assert calibrator.refusal is not None and "the lengths span too little" in calibrator.refusal


def test_the_calibrator_refuses_on_policy_batches_and_foreign_states() -> None:
    calibrator = BandCalibrator()
    s = torch.tensor([0.0, 0.0, 0.0, 0.3])
    with pytest.raises(ValueError, match="on-policy"):
        calibrator.observe(s, torch.ones(4))
    assert calibrator.state_dict()["seen"] == []
    with pytest.raises(ValueError, match=r"'multiple': 2\.0.*'multiple': 3\.0"):
        calibrator.load_state_dict(BandCalibrator(multiple=3.0).state_dict())


# The exponent.


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


def test_the_spread_is_a_quantile_by_hand() -> None:
    """Bins of 5; |S| of the longer ones are 8 times those of the shorter, L is 4 times theirs."""
    short = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5], dtype=torch.float64)
    s, lengths = torch.cat([short, 8 * short]), torch.tensor([10] * 5 + [40] * 5)
    assert fit_exponent(s, lengths, num_bins=2) == pytest.approx(1.5)
    # One huge outlier a bin is above the quantile and changes nothing.
    s[[4, 9]] = 1e6
    assert fit_exponent(s, lengths, num_bins=2) == pytest.approx(1.5)
    assert 0.5 < QUANTILE < 0.85


def test_the_interval_holds_the_exponent_about_as_often_as_it_says() -> None:
    """Although all sequences of a step have something in common, as those of one update do."""
    held, trials = 0, 200
    for seed in range(trials):
        s, lengths = walks(1024, 0.02, 0.6, seed=seed)
        blocks = steps(1024, 8)
        generator = torch.Generator().manual_seed(10_000 + seed)
        common = torch.randn(8, generator=generator, dtype=torch.float64)
        s = s + 0.02 * common[blocks] * lengths.double() ** 0.6
        low, high = measure_exponent(s, lengths, blocks).interval
        held += low <= 0.6 <= high
    assert 0.88 < held / trials <= 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, n, b: (s, n, b.clamp(max=1)), "2 independent groups of sequences"),
        (lambda s, n, b: (s * 0, n, b), "0 sequences have S ≠ 0; at least 64"),
        (lambda s, n, b: (s, n * 0 + 50, b), "span too little: 1 length bins"),
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
