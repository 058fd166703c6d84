"""The sequence surrogate: every branch by hand, extremes, empty and broken sequences; laws for any input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.objective import (
    ClipBand,
    ConstantDualClip,
    DualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
    Surrogate,
    sequence_surrogate,
)

FLAGS = ("clipped_low", "clipped_high", "dual_clipped", "below", "above", "nonfinite")
FSPO = FSPOBand(c_low=0.03, c_high=0.05)
DUAL = LengthFairDualClip(c=0.1)


def one(s: float, length: int, a: float, band: ClipBand, dual: DualClip | None = None) -> Surrogate:
    return sequence_surrogate(torch.tensor([s]), torch.tensor([length]), torch.tensor([a]), band, dual)


def raised(result: Surrogate) -> set[str]:
    """Names of the flags that a batch of one sequence has."""
    return {name for name in FLAGS if vars(result)[name].item()}


@pytest.mark.parametrize(
    ("s", "length", "a", "dual", "objective", "weight", "flags"),
    [
        # Inside: J = weight = e^S·A.
        (0.3, 100, 2.0, None, 2 * math.exp(0.3), 2 * math.exp(0.3), set()),
        (-0.2, 100, -2.0, None, -2 * math.exp(-0.2), -2 * math.exp(-0.2), set()),
        # Outside, on the side that the min-form clips.
        (0.6, 100, 2.0, None, 2 * math.exp(0.5), 0.0, {"above", "clipped_high"}),
        (-0.4, 100, -2.0, None, -2 * math.exp(-0.3), 0.0, {"below", "clipped_low"}),
        # Outside, on the other side: the gradient stays.
        (-0.4, 100, 2.0, None, 2 * math.exp(-0.4), 2 * math.exp(-0.4), {"below"}),
        (0.6, 100, -2.0, DUAL, -2 * math.exp(0.6), -2 * math.exp(0.6), {"above"}),
        (1.2, 100, -2.0, DUAL, -2 * math.exp(1.0), 0.0, {"above", "dual_clipped"}),
        # Far outside: clipped before exp, so nothing overflows.
        (1e4, 100, 1.0, None, math.exp(0.5), 0.0, {"above", "clipped_high"}),
        (-1e4, 100, -1.0, None, -math.exp(-0.3), 0.0, {"below", "clipped_low"}),
        (1e4, 100, -1.0, DUAL, -math.exp(1.0), 0.0, {"above", "dual_clipped"}),
        (-1e4, 100, 1.0, None, 0.0, 0.0, {"below"}),
        # No limit on this side without a dual clip: the overflow is reported, not turned into a ratio.
        (1e4, 100, -1.0, None, 0.0, 0.0, {"nonfinite"}),
        (1e4, 100, 0.0, None, 0.0, 0.0, {"above"}),
        (-1e4, 100, 0.0, None, 0.0, 0.0, {"below"}),
        (0.2, 100, 0.0, None, 0.0, 0.0, set()),
        # Not finite, whatever the advantage and the side.
        (math.inf, 100, 1.0, DUAL, 0.0, 0.0, {"nonfinite"}),
        (math.inf, 100, -1.0, DUAL, 0.0, 0.0, {"nonfinite"}),
        (-math.inf, 100, 1.0, None, 0.0, 0.0, {"nonfinite"}),
        (-math.inf, 100, -1.0, None, 0.0, 0.0, {"nonfinite"}),
        (math.nan, 100, 1.0, None, 0.0, 0.0, {"nonfinite"}),
        (math.nan, 100, 0.0, None, 0.0, 0.0, {"nonfinite"}),
        (0.1, 100, math.nan, None, 0.0, 0.0, {"nonfinite"}),
        (0.1, 100, math.inf, None, 0.0, 0.0, {"nonfinite"}),
        (0.1, 100, -math.inf, DUAL, 0.0, 0.0, {"nonfinite"}),
        (0.4, 100, 3e38, None, 0.0, 0.0, {"nonfinite"}),
        # Nothing there: no flag at all, not even for NaN.
        (0.0, 0, 1.0, None, 0.0, 0.0, set()),
        (5.0, 0, 1.0, None, 0.0, 0.0, set()),
        (-5.0, 0, -1.0, DUAL, 0.0, 0.0, set()),
        (math.nan, 0, 1.0, None, 0.0, 0.0, set()),
        (0.0, 0, math.inf, DUAL, 0.0, 0.0, set()),
        # Lengths at the ends.
        (0.04, 1, 1.0, None, math.exp(0.04), math.exp(0.04), set()),
        (0.06, 1, 1.0, None, math.exp(0.05), 0.0, {"above", "clipped_high"}),
        (49.0, 10**6, 1.0, None, math.exp(49.0), math.exp(49.0), set()),
        (51.0, 10**6, 1.0, None, math.exp(50.0), 0.0, {"above", "clipped_high"}),
    ],
)
def test_extremes(s, length, a, dual, objective, weight, flags) -> None:
    got = one(s, length, a, FSPO, dual)
    assert raised(got) == flags
    assert got.objective.item() == pytest.approx(objective, rel=1e-5)
    assert got.weight.item() == pytest.approx(weight, rel=1e-5)


def test_gspo_weighs_by_the_mean_and_survives_an_empty_response() -> None:
    band = GSPOBand(eps_low=0.1, eps_high=0.2)
    got = one(10.0, 100, 3.0, band)
    assert got.objective.item() == pytest.approx(3 * math.exp(0.1), rel=1e-5)
    assert got.weight.item() == pytest.approx(3 * math.exp(0.1) / 100, rel=1e-5)
    assert raised(one(20.0, 100, 3.0, band)) == {"above", "clipped_high"}
    assert raised(one(0.0, 0, 3.0, band)) == set() and one(0.0, 0, 3.0, band).weight.item() == 0


@pytest.mark.parametrize("length", [10, 1000])
def test_a_constant_dual_clip_limits_the_ratio_of_its_band(length: int) -> None:
    dual = ConstantDualClip(ratio=3.0)
    for band, edge in (
        (RLOOBand(eps_low=0.2, eps_high=0.2), 1),
        (GSPOBand(eps_low=0.1, eps_high=0.1), length),
    ):
        under, over = (
            one(math.log(3.0) * edge * factor, length, -1.0, band, dual) for factor in (0.99, 1.01)
        )
        assert raised(under) == {"above"} and raised(over) == {"above", "dual_clipped"}
        assert over.objective.item() == pytest.approx(-3.0, rel=1e-5) and over.weight.item() == 0
        assert under.weight.item() < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_s_is_kept_and_used(dtype: torch.dtype) -> None:
    s = torch.tensor([1e-9 + math.log(1.2), math.log(1.2) - 1e-9], dtype=dtype)
    band = RLOOBand(eps_low=0.2, eps_high=0.2)
    got = sequence_surrogate(s, torch.tensor([5, 5]), torch.tensor([1.0, 1.0]), band)
    assert got.objective.dtype == got.weight.dtype == dtype
    # 1e-9 from the limit has two sides in float64 only, also with int64 lengths and float32 advantages.
    assert got.above.tolist() == ([True, False] if dtype == torch.float64 else [False, False])


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    three, lengths = torch.zeros(3), torch.ones(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="bfloat16"):
        sequence_surrogate(three.bfloat16(), lengths, three, FSPO)
    with pytest.raises(ValueError, match=r"advantages must both be \[N\], got \[3\] and \[1\]"):
        sequence_surrogate(three, lengths, torch.zeros(1), FSPO)
    with pytest.raises(ValueError, match=r"lengths must both be \[N\], got \[3\] and \[3, 1\]"):
        sequence_surrogate(three, lengths[:, None], three, FSPO)
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        sequence_surrogate(torch.zeros(3, 1), lengths[:, None], torch.zeros(3, 1), FSPO)


# Laws.

LAWS = settings(deadline=None, max_examples=100, derandomize=True, database=None)

bands = st.sampled_from(
    [
        FSPOBand(c_low=0.05, c_high=0.05),
        FSPOBand(c_low=0.03, c_high=0.2, drift=-0.001),
        RLOOBand(eps_low=0.2, eps_high=0.28),
        GSPOBand(eps_low=3e-3, eps_high=4e-3),
    ]
)
dual_clips = st.sampled_from([None, LengthFairDualClip(c=0.4), ConstantDualClip(ratio=3.0)])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """S, L, A in float64. S has the scale of the bands, so that both sides of each limit are drawn."""
    size = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 4096), min_size=size, max_size=size))
    per_root = draw(st.lists(st.floats(-1.0, 1.0), min_size=size, max_size=size))
    advantages = draw(st.lists(st.floats(-3, 3).map(lambda a: round(a, 2)), min_size=size, max_size=size))
    length = torch.tensor(lengths)
    s = torch.tensor(per_root, dtype=torch.float64) * length.double().sqrt()
    return s, length, torch.tensor(advantages, dtype=torch.float64)


@LAWS
@given(batches(), bands, dual_clips)
def test_a_flag_and_a_zero_weight_go_together(batch, band, dual) -> None:
    s, lengths, advantages = batch
    got = sequence_surrogate(s, lengths, advantages, band, dual)
    assert not got.nonfinite.any()
    assert torch.equal(got.weight == 0, got.clipped | (advantages == 0))
    assert not (got.clipped & (advantages == 0)).any()
    assert (got.clipped_low.int() + got.clipped_high.int() + got.dual_clipped.int() <= 1).all()
    low, high = band.bounds(lengths.double())
    assert torch.equal(got.below, s < low) and torch.equal(got.above, s > high)
    assert torch.equal(got.out_of_band, (s < low) | (s > high))


@LAWS
@given(batches(), bands, dual_clips)
def test_the_objective_is_pessimistic_and_the_dual_clip_bounds_it(batch, band, dual) -> None:
    s, lengths, advantages = batch
    scale = band.log_ratio_scale(lengths.double())
    plain = sequence_surrogate(s, lengths, advantages, band)
    unclipped = (scale * s).exp() * advantages
    slack = 1e-12 * unclipped.abs()
    assert (plain.objective <= unclipped + slack).all()
    if dual is not None:
        floor = (scale * dual.log_bound(lengths.double(), scale)).exp() * advantages
        got = sequence_surrogate(s, lengths, advantages, band, dual)
        negative = advantages < 0
        assert (got.objective >= floor - 1e-12 * floor.abs())[negative].all()
        assert (got.objective >= plain.objective).all()
        assert torch.equal(got.objective[~negative], plain.objective[~negative])


@LAWS
@given(batches(), st.integers(1, 4), st.booleans())
def test_scale_law_of_the_square_root_band(batch, power, with_dual) -> None:
    """k times the length and √k times S: no flag changes. k = 4^p makes √k, and so the law, exact."""
    s, lengths, advantages = batch
    s = s / 8  # at most 128 nats after scaling: exp does not overflow
    band, dual = FSPOBand(c_low=0.03, c_high=0.05), LengthFairDualClip(c=0.08) if with_dual else None
    before = sequence_surrogate(s, lengths, advantages, band, dual)
    after = sequence_surrogate(s * 2**power, lengths * 4**power, advantages, band, dual)
    for name in FLAGS:
        assert torch.equal(vars(before)[name], vars(after)[name]), name


@LAWS
@given(batches())
def test_flipping_s_and_a_swaps_low_and_high(batch) -> None:
    s, lengths, advantages = batch
    band = FSPOBand(c_low=0.05, c_high=0.05)
    got = sequence_surrogate(s, lengths, advantages, band)
    flipped = sequence_surrogate(-s, lengths, -advantages, band)
    assert torch.equal(got.clipped_low, flipped.clipped_high)
    assert torch.equal(got.clipped_high, flipped.clipped_low)
    assert torch.equal(got.below, flipped.above)


@LAWS
@given(batches(), bands, dual_clips, st.randoms(use_true_random=False))
def test_sequences_do_not_see_each_other(batch, band, dual, random) -> None:
    order = list(range(len(batch[0])))
    random.shuffle(order)
    got = sequence_surrogate(*batch, band, dual)
    shuffled = sequence_surrogate(*(column[order] for column in batch), band, dual)
    for name, column in vars(got).items():
        assert torch.equal(column[order], vars(shuffled)[name]), name
