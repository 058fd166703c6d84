import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_fspo.objective import (
    ClipBand,
    FSPOBand,
    GSPOBand,
    LengthBin,
    LengthFairDualClip,
    LengthReweightingError,
    RLOOBand,
    effective_sample_size,
    length_reweighting_error,
    sequence_surrogate,
)

SIGMA = 0.02


def random_walks(lengths: tuple[int, ...], each: int) -> tuple[Tensor, Tensor]:
    """S ~ Normal(0, σ²L), ``each`` sequences of every length."""
    length = torch.tensor(lengths).repeat_interleave(each)
    noise = torch.randn(len(length), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return SIGMA * length.double().sqrt() * noise, length


def clip_rates(band: ClipBand, s: Tensor, lengths: Tensor) -> dict[int, float]:
    outside = sequence_surrogate(s, lengths, torch.ones_like(s), band).out_of_band
    return {n: outside[lengths == n].double().mean().item() for n in lengths.unique().tolist()}


def normal_tail(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2


def test_fspo_clips_every_length_alike_and_the_others_do_not() -> None:
    each, lengths = 20_000, (16, 64, 256, 1024, 4096)
    s, length = random_walks(lengths, each)

    # By theory, with z = 1.5 below and 2 above: P = Q(1.5) + Q(2), at every length.
    expected = normal_tail(1.5) + normal_tail(2.0)
    error = math.sqrt(expected * (1 - expected) / each)
    fspo = clip_rates(FSPOBand(c_low=1.5 * SIGMA, c_high=2 * SIGMA), s, length)
    assert all(abs(rate - expected) < 4.5 * error for rate in fspo.values()), fspo

    # The other two, right at L = 256, are off by far more than chance at both ends, in opposite directions.
    width = 1.8 * SIGMA * math.sqrt(256)
    rloo = clip_rates(RLOOBand(eps_low=-math.expm1(-width), eps_high=math.expm1(width)), s, length)
    gspo = clip_rates(
        GSPOBand(eps_low=-math.expm1(-width / 256), eps_high=math.expm1(width / 256)), s, length
    )
    assert abs(rloo[256] - 2 * normal_tail(1.8)) < 4.5 * error
    assert abs(gspo[256] - 2 * normal_tail(1.8)) < 4.5 * error
    assert rloo[16] < 0.001 and rloo[4096] > 0.6 and list(rloo.values()) == sorted(rloo.values())
    assert (
        gspo[16] > 0.6 and gspo[4096] < 0.001 and list(gspo.values()) == sorted(gspo.values(), reverse=True)
    )


def test_lre_by_hand() -> None:
    """Two lengths, ten sequences: a = (3/4, 3/6), ā = 6/10, so the errors are 1/4 and 1/6."""
    lengths = torch.tensor([5] * 4 + [9] * 6)
    accepted = torch.tensor([True, True, True, False] + [True] * 3 + [False] * 3)
    got = length_reweighting_error(accepted, lengths, num_bins=2)
    assert got.mean == pytest.approx(0.4 / 4 + 0.6 / 6)
    assert got.max == pytest.approx(1 / 4)
    assert got.accepted_rate == pytest.approx(0.6)
    assert got.bins == (
        LengthBin(low=5, high=5, share=0.4, accepted_rate=0.75),
        LengthBin(low=9, high=9, share=0.6, accepted_rate=0.5),
    )


def test_bins_are_quantiles_and_equal_lengths_share_one() -> None:
    lengths = torch.arange(1, 81)
    got = length_reweighting_error(lengths > 10, lengths, draws=0)
    assert [(entry.low, entry.high) for entry in got.bins] == [(10 * i + 1, 10 * i + 10) for i in range(8)]
    # One bin of eight accepts nothing: |0/(7/8) − 1| = 1 there, |1/(7/8) − 1| = 1/7 in the others.
    assert [entry.accepted_rate for entry in got.bins] == [0.0] + [1.0] * 7
    assert got.max == pytest.approx(1.0) and got.mean == pytest.approx(1 / 8 + 7 / 8 / 7)
    # Most responses hit the length limit: one bin holds them all, however many quantiles fall on it.
    lengths = torch.tensor([3, 4, 7, 9, 12, *[64] * 35])
    got = length_reweighting_error(torch.ones(40, dtype=torch.bool), lengths)
    assert got.bins[-1] == LengthBin(low=64, high=64, share=35 / 40, accepted_rate=1.0)
    assert all(a.high < b.low for a, b in zip(got.bins, got.bins[1:], strict=False))
    assert got.mean == got.max == 0.0


def same(a: LengthReweightingError, b: LengthReweightingError) -> bool:
    one, other = (dataclasses.asdict(error) for error in (a, b))
    return one.pop("bins") == other.pop("bins") and all(other[k] == pytest.approx(v) for k, v in one.items())


def test_nothing_depends_on_the_order_and_a_seed_repeats() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (300,), generator=generator)
    accepted = torch.rand(300, generator=generator) < 0.7
    order = torch.randperm(300, generator=generator)
    state = torch.get_rng_state()
    got = length_reweighting_error(accepted, lengths)
    assert same(got, length_reweighting_error(accepted[order], lengths[order]))
    assert not same(got, length_reweighting_error(accepted, lengths, seed=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_null_is_what_chance_gives() -> None:
    """Flags without regard to length, again and again: their LRE averages to the null floor of any one."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 500, (800,), generator=generator)
    figures = [
        length_reweighting_error(torch.rand(800, generator=generator) < 0.8, lengths) for _ in range(60)
    ]
    means, maxima, null_means, null_maxima = (
        torch.tensor([getattr(figure, name) for figure in figures])
        for name in ("mean", "max", "null_mean", "null_max")
    )
    assert means.mean().item() == pytest.approx(null_means.mean().item(), rel=0.1)
    assert maxima.mean().item() == pytest.approx(null_maxima.mean().item(), rel=0.1)
    # By theory, for 8 bins of m = 100: a_b has deviation √(ā(1 − ā)/m·7/8), and E|Z| = √(2/π).
    expected = math.sqrt(0.2 / 0.8 / 100 * 7 / 8 * 2 / math.pi)
    assert null_means.mean().item() == pytest.approx(expected, rel=0.05)
    # A real effect leaves the floor where it was.
    steep = torch.rand(800, generator=generator) < 1.1 - lengths / 800
    real = length_reweighting_error(steep, lengths)
    assert real.mean > 4 * real.null_mean


def test_the_interval_covers_the_true_value() -> None:
    """Two lengths accepted at .9 and .5: ā = .7 and both errors are 2/7. Nominal 95%; 80 trials."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([10] * 200 + [20] * 200)
    rates = torch.tensor([0.9] * 200 + [0.5] * 200)
    inside_mean = inside_max = 0
    widths = []
    for _ in range(80):
        accepted = torch.rand(400, generator=generator) < rates
        got = length_reweighting_error(accepted, lengths)
        inside_mean += got.mean_interval[0] <= 2 / 7 <= got.mean_interval[1]
        inside_max += got.max_interval[0] <= 2 / 7 <= got.max_interval[1]
        widths.append(got.mean_interval[1] - got.mean_interval[0])
    assert 68 <= inside_mean <= 80 and 68 <= inside_max <= 80
    # Covering by being wide would be no merit. Both errors are (a₁ − a₂)/(a₁ + a₂) here, whose deviation is
    # √(.51²·.09 + .92²·.25)/√200 = .034, so that the interval is 3.92 · .034 = .134 wide.
    assert sum(widths) / 80 == pytest.approx(0.134, rel=0.15)


def test_rows_of_one_prompt_count_once_and_strata_are_judged_for_themselves() -> None:
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 500, (400,), generator=generator)
    accepted = torch.rand(400, generator=generator) < 1.1 - lengths / 800
    once = length_reweighting_error(accepted, lengths)
    four, prompts = (x.repeat(4) for x in (accepted, torch.arange(400)))
    same_prompts = length_reweighting_error(four, lengths.repeat(4), clusters=prompts)
    assert (same_prompts.mean, same_prompts.bins) == (pytest.approx(once.mean), once.bins)
    assert same_prompts.null_mean == pytest.approx(once.null_mean, rel=0.02)
    assert same_prompts.mean_interval == pytest.approx(once.mean_interval, rel=0.05)
    independent = length_reweighting_error(four, lengths.repeat(4))
    assert independent.null_mean == pytest.approx(once.null_mean / 2, rel=0.05)

    # Signs that go with length and are accepted at different rates: uneven over all, even within each.
    sign = (torch.rand(20_000, generator=generator) < torch.arange(20_000) / 20_000).long()
    lengths = torch.arange(1, 20_001)
    accepted = torch.rand(20_000, generator=generator) < 0.9 - 0.4 * sign
    whole = length_reweighting_error(accepted, lengths)
    within = length_reweighting_error(accepted, lengths, strata=sign)
    assert whole.mean > 0.1 and within.mean < 2 * within.null_mean < 0.03
    assert within.accepted_rate == whole.accepted_rate and within.bins == whole.bins
    parts = [length_reweighting_error(accepted[sign == s], lengths[sign == s], draws=0) for s in (0, 1)]
    shares = [(sign == s).double().mean().item() for s in (0, 1)]
    # Edges of bins are those of all lengths, so only about.
    assert within.mean == pytest.approx(
        sum(p.mean * w for p, w in zip(parts, shares, strict=True)), abs=0.005
    )
    assert length_reweighting_error(accepted, 1 + sign).mean > 0.2
    none = length_reweighting_error(accepted & (sign == 0), lengths, strata=sign)
    assert none.mean == pytest.approx(parts[0].mean, abs=0.005)


def test_edges() -> None:
    def lre(accepted: list[bool], lengths: list[int]) -> LengthReweightingError:
        return length_reweighting_error(
            torch.tensor(accepted, dtype=torch.bool), torch.tensor(lengths, dtype=torch.int64)
        )

    empty = lre([], [])
    assert math.isnan(empty.mean) and math.isnan(empty.null_max) and math.isnan(empty.accepted_rate)
    assert empty.bins == () and math.isnan(empty.max_interval[0])
    # Empty responses do not count.
    assert lre([True, False], [0, 0]).bins == ()
    assert same(lre([True, False, True, False], [4, 4, 9, 0]), lre([True, False, True], [4, 4, 9]))

    alone = lre([True], [7])
    assert alone.mean == alone.max == alone.null_mean == 0.0 and alone.mean_interval == (0.0, 0.0)
    refused = lre([False] * 4, [1, 2, 3, 4])
    assert refused.accepted_rate == 0.0 and math.isnan(refused.mean) and math.isnan(refused.mean_interval[1])
    # One of ten is rejected, alone in its bin: max 1, mean 2/10, and next to nothing is known of either.
    single = lre([False] + [True] * 9, [1] + [2] * 9)
    assert (single.mean, single.max) == pytest.approx((0.2, 1.0))
    assert single.mean_interval[0] == 0 and 0.4 < single.mean_interval[1] < 1

    skipped = length_reweighting_error(torch.tensor([True]), torch.tensor([1]), draws=0)
    assert math.isnan(skipped.null_mean) and math.isnan(skipped.mean_interval[0]) and skipped.mean == 0.0


def test_wrong_input_is_refused() -> None:
    flags, lengths = torch.ones(3, dtype=torch.bool), torch.tensor([1, 2, 3])
    for accepted, of, more, message in (
        (flags.float(), lengths, {}, r"accepted must be bool \[N\].*float32"),
        (flags, lengths[:2], {}, r"\[3\] and \[2\]"),
        (flags[:, None], lengths[:, None], {}, r"\[3, 1\]"),
        (flags, lengths, {"num_bins": 0}, "got 0 and 1000"),
        (flags, lengths, {"draws": -1}, "got 8 and -1"),
    ):
        with pytest.raises(ValueError, match=message):
            length_reweighting_error(accepted, of, **more)


def test_tempering_evens_out_the_weights() -> None:
    """In pure noise of 0.015 per token the weights of 16k tokens have an effective sample size of a few %."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(50_000, generator=generator, dtype=torch.float64) * 0.015
    a = torch.where(torch.rand(50_000, generator=generator) < 0.5, 1.0, -1.0).double()
    band, dual = FSPOBand(c_low=0.03, c_high=0.03), LengthFairDualClip(c=0.06)

    def ess(length: int, temper: float) -> float:
        lengths = torch.full_like(a, length)
        s = noise * length**0.5 - 0.015**2 * length / 2
        return effective_sample_size(sequence_surrogate(s, lengths, a, band, dual, temper=temper).ratio)

    assert ess(100, 0.0) > 0.95 and ess(16_384, 0.0) < 0.06 and ess(16_384, 0.5) > 0.9


def test_effective_sample_size_by_hand() -> None:
    for weights, share in (([2.0] * 4, 1.0), ([1.0, 0, 0, 0], 0.25), ([3.0, 1.0], 0.8), ([1e200, 0], 0.5)):
        assert effective_sample_size(torch.tensor(weights, dtype=torch.float64)) == pytest.approx(share)
    assert math.isnan(effective_sample_size(torch.zeros(3)))
