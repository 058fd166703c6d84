"""S taken apart, on responses whose parts are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from long_responses import rates_as_of
from megatron_fspo.lab.explain.decomposition import Decomposition, Parts, decompose, split_halves, take_apart
from megatron_fspo.objective import FSPOBand


def responses(
    count: int, *, signal: float, drift: float = 0.0, neighbours: float = 0.0, samples: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens [T] with noise of .02, and lengths of 20 to 2,000.

    ``neighbours`` is how much of a token's noise the next has; ``samples`` responses share a signal.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (20 * 100 ** torch.rand(count, generator=generator)).long()
    independent = torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64) * 0.02
    tokens = independent + neighbours * independent.roll(1) + drift
    shared = torch.randn(count // samples, generator=generator, dtype=torch.float64) * signal
    return tokens + shared.repeat_interleave(samples).repeat_interleave(lengths), lengths


def test_halves_are_sums_over_tokens() -> None:
    tokens = torch.arange(1.0, 9.0, dtype=torch.float64)
    halves = split_halves(tokens, torch.tensor([3, 1, 4]))
    assert halves.first.tolist() == [1, 5 + 6]
    assert halves.second.tolist() == [2 + 3, 7 + 8]
    assert halves.lengths.tolist() == [3, 4]
    assert halves.log_ratio_sums.tolist() == [6, 26]


@pytest.mark.parametrize(
    ("signal", "drift", "neighbours"), [(0.0, -0.001, 0.0), (0.001, 0.0, 0.0), (0.002, 0.003, 0.5)]
)
def test_the_parts_are_found(signal: float, drift: float, neighbours: float) -> None:
    found = decompose(split_halves(*responses(4000, signal=signal, drift=drift, neighbours=neighbours)))
    # Neighbours that go together add up to more per √token.
    assert found.noise == pytest.approx(0.02 * (1 + neighbours), rel=0.05)
    assert found.signal == pytest.approx(signal, rel=0.1, abs=0.0002)
    assert found.drift == pytest.approx(drift, abs=0.0002)


def test_noise_alone_grows_as_the_root_and_a_signal_faster() -> None:
    def one(signal: float) -> Decomposition:
        return Decomposition(drift=0.0, noise=0.02, signal_squared=signal**2)

    assert one(0.0).exponent(1000) == 0.5 and one(0.0).crossover == math.inf
    both = one(0.001)
    assert both.crossover == pytest.approx(400)
    assert both.exponent(400) == pytest.approx(0.75)
    assert 0.5 < both.exponent(4) < 0.51 < 0.99 < both.exponent(40_000) < 1
    near = [0.02**2 * n + (0.001 * n) ** 2 for n in (400, 404)]  # variances
    assert math.log(near[1] / near[0]) / 2 / math.log(404 / 400) == pytest.approx(
        both.exponent(402), abs=1e-3
    )


@pytest.mark.parametrize("signal", [0.0, 0.001])
def test_one_half_of_the_responses_predicts_what_the_other_has_outside(signal: float) -> None:
    halves = split_halves(*responses(4000, signal=signal, drift=0.0005))
    band = FSPOBand(c_low=0.03, c_high=0.03)
    even = torch.arange(4000) % 2 == 0
    known, other = halves[even], halves[~even]
    low, high = band.bounds(other.lengths.double())
    outside = (other.log_ratio_sums < low) | (other.log_ratio_sums > high)
    predicted = rates_as_of(known, other.lengths, band)
    for begin, end in ((20, 100), (100, 500), (500, 2001)):
        here = (other.lengths >= begin) & (other.lengths < end)
        rate = outside[here].double().mean().item()
        assert predicted[here].mean().item() == pytest.approx(rate, abs=0.05)
    # That the signal counts is seen where it is large: without it the prediction would be far off.
    if signal:
        alone = split_halves(*responses(2000, signal=0.0, seed=1))
        long = other.lengths >= 500
        assert outside[long].double().mean() > rates_as_of(alone, other.lengths[long], band).mean() + 0.1


def test_a_signal_of_prompts_is_found_and_one_of_chance_is_not() -> None:
    """Nominal: 2.5% and 95%. With signal² cut off at 0 and responses as independent: 6 of 60, 14 of 30."""

    def parts(prompts: int, samples: int, signal: float, seed: int) -> Parts:
        tokens, lengths = responses(prompts * samples, signal=signal, samples=samples, seed=seed)
        found = take_apart(tokens, lengths, torch.arange(prompts).repeat_interleave(samples))
        assert found is not None
        return found

    noise = [parts(200, 1, 0.0, seed) for seed in range(60)]
    assert sum(one.signal.low > 0 for one in noise) <= 4
    shared = [parts(24, 32, 0.003, seed) for seed in range(30)]
    assert sum(one.signal.low < 0.003 < one.signal.high for one in shared) >= 24
    assert all(one.crossover < 400 and one.exponent.low > 0.5 for one in shared)


def test_nothing_to_take_apart() -> None:
    for lengths, said in (([1] * 8, "at least 2 tokens"), ([4, 4], "nothing spreads")):
        with pytest.raises(ValueError, match=said):
            decompose(split_halves(torch.ones(8), torch.tensor(lengths)))
