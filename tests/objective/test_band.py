import math

import pytest
import torch
from torch import Tensor

from megatron_fspo.objective import (
    ClipBand,
    ConstantDualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
)


@pytest.mark.parametrize(
    ("band", "expected"),
    [
        (FSPOBand(c_low=0.03, c_high=0.05), {1: (-0.03, 0.05), 100: (-0.3, 0.5), 10_000: (-3.0, 5.0)}),
        (FSPOBand(c_low=0.03, c_high=0.05, drift=-0.001), {100: (-0.4, 0.4), 10_000: (-13.0, -5.0)}),
        (FSPOBand(c_low=0.1, c_high=0.2, exponent=0.25), {16: (-0.2, 0.4), 10_000: (-1.0, 2.0)}),
        (FSPOBand(c_low=0.1, c_high=0.2, exponent=0.0), {1: (-0.1, 0.2), 999: (-0.1, 0.2)}),
        (
            RLOOBand(eps_low=0.2, eps_high=0.28),
            {1: (math.log(0.8), math.log(1.28)), 999: (-0.2231436, 0.2468601)},
        ),
        (GSPOBand(eps_low=3e-4, eps_high=4e-4), {1: (-3.00045e-4, 3.9992e-4), 10_000: (-3.00045, 3.9992)}),
    ],
)
def test_limits_by_hand(band: ClipBand, expected: dict[int, tuple[float, float]]) -> None:
    low, high = band.bounds(torch.tensor(list(expected)))
    assert low.tolist() == pytest.approx([pair[0] for pair in expected.values()], rel=1e-5)
    assert high.tolist() == pytest.approx([pair[1] for pair in expected.values()], rel=1e-5)


def test_scale_is_one_for_sequence_ratios_and_one_over_l_for_gspo() -> None:
    lengths = torch.tensor([0, 1, 4, 1000])
    assert FSPOBand(c_low=0.1, c_high=0.1).log_ratio_scale(lengths).tolist() == [1, 1, 1, 1]
    assert RLOOBand(eps_low=0.1, eps_high=0.1).log_ratio_scale(lengths).tolist() == [1, 1, 1, 1]
    gspo = GSPOBand(eps_low=0.1, eps_high=0.1).log_ratio_scale(lengths)
    assert gspo.tolist() == pytest.approx([1, 1, 0.25, 0.001])


def test_dual_clip_limits_by_hand() -> None:
    lengths = torch.tensor([1.0, 100.0, 10_000.0])
    fair = LengthFairDualClip(c=0.06, drift=-0.001).log_bound(lengths, torch.ones(3))
    assert fair.tolist() == pytest.approx([0.059, 0.5, -4.0], rel=1e-5)
    constant = ConstantDualClip(ratio=math.e)
    assert constant.log_bound(lengths, torch.ones(3)).tolist() == pytest.approx([1, 1, 1])
    assert constant.log_bound(lengths, 1 / lengths).tolist() == pytest.approx([1, 100, 10_000])


@pytest.mark.parametrize(
    "band",
    [
        FSPOBand(c_low=0.1, c_high=0.1, drift=-0.1),
        RLOOBand(eps_low=0.1, eps_high=0.1),
        GSPOBand(eps_low=0.1, eps_high=0.1),
    ],
)
def test_limits_have_the_dtype_of_floating_lengths_and_float32_otherwise(band: ClipBand) -> None:
    def tensors(lengths: Tensor) -> list[Tensor]:
        return [*band.bounds(lengths), band.log_ratio_scale(lengths)]

    lengths = torch.tensor([1, 7])
    assert {tensor.dtype for tensor in tensors(lengths)} == {torch.float32}
    assert {tensor.dtype for tensor in tensors(lengths.double())} == {torch.float64}
    assert all(tensor.shape == (2,) for tensor in tensors(lengths))


@pytest.mark.parametrize(
    ("make", "fields", "name"),
    [
        (FSPOBand, {"c_low": 0.0, "c_high": 0.1}, "FSPOBand.c_low"),
        (FSPOBand, {"c_low": 0.1, "c_high": -0.1}, "FSPOBand.c_high"),
        (FSPOBand, {"c_low": 0.1, "c_high": math.inf}, "FSPOBand.c_high"),
        (FSPOBand, {"c_low": math.nan, "c_high": 0.1}, "FSPOBand.c_low"),
        (FSPOBand, {"c_low": 0.1, "c_high": 0.1, "drift": math.nan}, "FSPOBand.drift"),
        (FSPOBand, {"c_low": 0.1, "c_high": 0.1, "exponent": 1.5}, "FSPOBand.exponent"),
        (FSPOBand, {"c_low": 0.1, "c_high": 0.1, "exponent": -0.5}, "FSPOBand.exponent"),
        (RLOOBand, {"eps_low": 1.0, "eps_high": 0.1}, "RLOOBand.eps_low"),
        (RLOOBand, {"eps_low": 0.1, "eps_high": 0.0}, "RLOOBand.eps_high"),
        (GSPOBand, {"eps_low": -0.1, "eps_high": 0.1}, "GSPOBand.eps_low"),
        (GSPOBand, {"eps_low": 0.1, "eps_high": math.nan}, "GSPOBand.eps_high"),
        (LengthFairDualClip, {"c": 0.0}, "LengthFairDualClip.c"),
        (LengthFairDualClip, {"c": 0.1, "drift": math.inf}, "LengthFairDualClip.drift"),
        (LengthFairDualClip, {"c": 0.1, "exponent": 2.0}, "LengthFairDualClip.exponent"),
        (ConstantDualClip, {"ratio": 1.0}, "ConstantDualClip.ratio"),
        (ConstantDualClip, {"ratio": math.inf}, "ConstantDualClip.ratio"),
    ],
)
def test_a_field_that_is_not_legal_is_named(make, fields, name) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        make(**fields)
