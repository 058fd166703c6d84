"""S taken apart, on responses whose parts are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_fspo.lab.explain.decomposition import Decomposition, Halves, decompose, halves_of
from megatron_fspo.objective import FSPOBand


def responses(
    count: int, *, noise: float, signal: float, drift: float = 0.0, neighbours: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens [T] and lengths of 20 to 2,000; ``neighbours`` is how much of a token's noise the next has."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (20 * 100 ** torch.rand(count, generator=generator)).long()
    independent = torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64) * noise
    tokens = independent + neighbours * independent.roll(1) + drift
    shared = torch.randn(count, generator=generator, dtype=torch.float64) * signal
    return tokens + shared.repeat_interleave(lengths), lengths


def test_halves_are_sums_over_tokens() -> None:
    tokens = torch.arange(1.0, 9.0, dtype=torch.float64)
    halves = halves_of(tokens, torch.tensor([3, 1, 4]))
    assert halves.first.tolist() == [1, 5 + 6]
    assert halves.second.tolist() == [2 + 3, 7 + 8]
    assert halves.lengths.tolist() == [3, 4]
    assert halves.log_ratio_sums.tolist() == [6, 26]


@pytest.mark.parametrize(
    ("noise", "signal", "drift", "neighbours"),
    [(0.02, 0.0, 0.0, 0.0), (0.02, 0.0, -0.001, 0.0), (0.02, 0.001, 0.0, 0.0), (0.02, 0.002, 0.003, 0.5)],
)
def test_the_parts_are_found(noise: float, signal: float, drift: float, neighbours: float) -> None:
    found = decompose(
        halves_of(*responses(4000, noise=noise, signal=signal, drift=drift, neighbours=neighbours))
    )
    # Neighbours that go together add up to more per √token.
    assert found.noise == pytest.approx(noise * (1 + neighbours), rel=0.05)
    assert found.signal == pytest.approx(signal, rel=0.1, abs=0.0002)
    assert found.drift == pytest.approx(drift, abs=0.0002)


def test_noise_alone_grows_as_the_root_and_a_signal_faster() -> None:
    def one(signal: float) -> Decomposition:
        return Decomposition(drift=0.0, noise=0.02, signal_squared=signal**2, shape=torch.zeros(1))

    assert one(0.0).exponent(1000) == 0.5 and one(0.0).crossover == math.inf
    both = one(0.001)
    assert both.crossover == pytest.approx(400)
    assert both.exponent(400) == pytest.approx(0.75)
    assert 0.5 < both.exponent(4) < 0.51 < 0.99 < both.exponent(40_000) < 1
    near = both.spread(torch.tensor([400.0, 404.0]))
    assert math.log(near[1] / near[0]) / math.log(404 / 400) == pytest.approx(both.exponent(402), abs=1e-3)


@pytest.mark.parametrize("signal", [0.0, 0.001])
def test_one_half_of_the_responses_predicts_what_the_other_has_outside(signal: float) -> None:
    halves = halves_of(*responses(4000, noise=0.02, signal=signal, drift=0.0005))
    band = FSPOBand(c_low=0.03, c_high=0.03)
    even = torch.arange(4000) % 2 == 0
    known, other = halves[even], halves[~even]
    low, high = band.bounds(other.lengths.double())
    outside = (other.log_ratio_sums < low) | (other.log_ratio_sums > high)
    predicted = decompose(known).clip_rates(other.lengths, band)
    for begin, end in ((20, 100), (100, 500), (500, 2001)):
        here = (other.lengths >= begin) & (other.lengths < end)
        rate = outside[here].double().mean().item()
        assert predicted[here].mean().item() == pytest.approx(rate, abs=0.05)
    # That the signal counts is seen where it is large: without it the prediction would be far off.
    if signal:
        alone = decompose(halves_of(*responses(2000, noise=0.02, signal=0.0, seed=1)))
        long = other.lengths >= 500
        assert outside[long].double().mean() > alone.clip_rates(other.lengths[long], band).mean() + 0.1


def test_rates_are_those_of_the_shape() -> None:
    parts = Decomposition(
        drift=0.0, noise=1.0, signal_squared=0.0, shape=torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).double()
    )
    rates = parts.clip_rates(torch.tensor([4, 9]), FSPOBand(c_low=1.5, c_high=0.5))
    assert rates.tolist() == [0.6, 0.6]  # one below −1.5, two above 0.5
    on_the_edge = parts.clip_rates(torch.tensor([4]), FSPOBand(c_low=1.0, c_high=1.0))
    assert on_the_edge.tolist() == [0.4]


def test_nothing_to_take_apart() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        decompose(Halves(first=none, second=none, lengths=none.long()))
    with pytest.raises(ValueError, match="nothing spreads"):
        decompose(halves_of(torch.ones(8), torch.tensor([4, 4])))
