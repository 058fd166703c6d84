"""The noise of S from two passes: what is fitted, and what is predicted from it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_fspo.objective import FSPOBand
from megatron_fspo.objective.noise import measure_noise, two_sigma

BAND = FSPOBand(c_low=0.03, c_high=0.05)


def drawn(count: int, *, sigma: float, drift: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """S and L of a random walk with a drift."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 600, (count,), generator=generator)
    z = torch.randn(count, generator=generator, dtype=torch.float64)
    return drift * lengths + sigma * lengths.sqrt() * z, lengths


def normal_share(low: float, high: float) -> float:
    """Of a standard normal outside."""
    return 0.5 * (1 + math.erf(low / math.sqrt(2))) + 0.5 * (1 - math.erf(high / math.sqrt(2)))


def test_a_random_walk_is_recovered_and_predicted_at_lengths_that_were_not_seen() -> None:
    sigma, drift = 0.04, -0.002
    noise = measure_noise(*drawn(20_000, sigma=sigma, drift=drift))
    assert noise.sigma == pytest.approx(sigma, rel=0.05)
    assert noise.drift == pytest.approx(drift, rel=0.05)
    assert noise.drift_length == pytest.approx((sigma / drift) ** 2, rel=0.15)
    lengths = torch.tensor([4, 100, 2000, 16384])
    for length, found in zip(lengths.tolist(), noise.clip_rates(lengths, BAND).tolist(), strict=True):
        shift = drift * math.sqrt(length)
        want = normal_share((-0.03 - shift) / sigma, (0.05 - shift) / sigma)
        assert found == pytest.approx(want, abs=0.05), length


def test_short_and_long_responses_have_noise_of_their_own() -> None:
    """As where short ones are answers that the model is sure of."""
    lengths = torch.tensor([8] * 200 + [800] * 200)
    sign = torch.tensor([1.0, -1.0]).repeat(200).double()
    sums = torch.where(lengths == 8, 0.01, 0.2) * lengths.sqrt() * sign
    noise = measure_noise(sums, lengths)
    assert noise.drift == 0 and noise.drift_length == math.inf
    assert noise.clip_rates(torch.tensor([1, 8, 800, 9000]), BAND).tolist() == [0, 0, 1, 1]
    assert noise.smallest_c(0.01, 8) == pytest.approx(0.01)
    assert noise.smallest_c(0.01, 9000) == pytest.approx(0.2)


def test_the_smallest_c_leaves_the_share_that_was_asked_for() -> None:
    sums, lengths = drawn(1000, sigma=0.05, drift=-0.003)
    noise = measure_noise(sums, lengths)
    for length in (16, 600, 5000):
        for centred in (False, True):
            c = noise.smallest_c(0.01, length, centred=centred)
            drift = noise.drift if centred else 0.0
            for width, inside in ((1.001 * c, True), (0.97 * c, False)):
                band = FSPOBand(c_low=width, c_high=width, drift=drift)
                rate = noise.clip_rates(torch.tensor([length]), band).item()
                assert (rate <= 0.01) is inside, (length, centred)
    assert noise.smallest_c(0.01, 5000, centred=True) < noise.smallest_c(0.01, 5000)


def test_two_equal_passes_have_no_noise() -> None:
    lengths = torch.tensor([3, 9, 0, 4])
    noise = measure_noise(torch.zeros(4), lengths)
    assert (noise.sigma, noise.drift, noise.drift_length) == (0, 0, math.inf)
    assert noise.lengths.tolist() == [3, 4, 9]  # the empty response is in nothing
    assert noise.clip_rates(torch.tensor([0, 5, 5]), BAND).tolist() == [0, 0, 0]
    assert noise.smallest_c(0.01, 100) == 0


def test_what_is_not_finite_or_empty_is_left_out() -> None:
    sums = torch.tensor([1.0, math.nan, 2.0, math.inf, 5.0])
    noise = measure_noise(sums, torch.tensor([1, 1, 4, 4, 0]))
    assert noise.lengths.tolist() == [1, 4]
    assert noise.drift == pytest.approx(3 / 5)
    with pytest.raises(ValueError, match="finite S"):
        measure_noise(torch.tensor([math.nan]), torch.tensor([3]))
    assert math.isnan(two_sigma(torch.tensor([math.nan]), torch.tensor([3])))


def test_of_many_responses_an_even_part_is_kept() -> None:
    sums, lengths = drawn(5000, sigma=0.05, drift=0.0)
    noise = measure_noise(sums, lengths)
    assert len(noise.lengths) == len(noise.residuals) == 1024
    assert (noise.lengths[0], noise.lengths[-1]) == (lengths.min(), lengths.max())
    assert noise.sigma == pytest.approx(0.05, rel=0.1)
