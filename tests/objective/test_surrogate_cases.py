"""The sequence surrogate case by case: every branch by hand, extremes, empty and broken sequences."""

import math

import pytest
import torch

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


def test_tokens_are_sequences_of_one_token() -> None:
    log_ratio = torch.tensor([0.1, 0.3, 0.3, -0.3, -0.3, 2.0, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    band, dual = RLOOBand(eps_low=0.2, eps_high=0.28), ConstantDualClip(ratio=3.0)
    got = sequence_surrogate(log_ratio, torch.ones(7), advantages, band, dual)
    e = math.exp
    assert got.objective.tolist() == pytest.approx([e(0.1), 1.28, -e(0.3), -0.8, e(-0.3), -3.0, 0.0])
    assert got.weight.tolist() == pytest.approx([e(0.1), 0.0, -e(0.3), 0.0, e(-0.3), 0.0, 0.0])
    assert got.clipped_high.nonzero().flatten().tolist() == [1]
    assert got.clipped_low.nonzero().flatten().tolist() == [3]
    assert got.dual_clipped.nonzero().flatten().tolist() == [5]
    assert got.above.nonzero().flatten().tolist() == [1, 2, 5]


def test_one_bad_sequence_leaves_the_others_alone() -> None:
    s = torch.tensor([0.1, math.nan, 0.2, math.inf, 0.0])
    lengths, advantages = torch.tensor([10, 10, 10, 10, 0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    got = sequence_surrogate(s, lengths, advantages, RLOOBand(eps_low=0.5, eps_high=0.5))
    assert got.nonfinite.tolist() == [False, True, False, True, False]
    expected = [math.exp(0.1), 0.0, -math.exp(0.2), 0.0, 0.0]
    assert got.weight.tolist() == pytest.approx(expected) and got.objective.tolist() == pytest.approx(
        expected
    )


def test_no_sequences() -> None:
    got = sequence_surrogate(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0), FSPO, DUAL)
    assert all(column.shape == (0,) for column in vars(got).values())


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
