"""The analytic weight against the derivative of the published min/max form.

The oracle is written from the formula, with exp of both sides and a real min and max; the code under test
never evaluates those. Kinks (S exactly on a limit) are left out: there is no derivative there.
"""

import itertools
import math

import pytest
import torch

from megatron_fspo.objective import (
    ConstantDualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
    sequence_surrogate,
)

BANDS = {
    "fspo": FSPOBand(c_low=0.05, c_high=0.08),
    "fspo-drift": FSPOBand(c_low=0.05, c_high=0.08, drift=-0.01, exponent=0.6),
    "rloo": RLOOBand(eps_low=0.2, eps_high=0.3),
    "gspo": GSPOBand(eps_low=0.03, eps_high=0.04),
}
DUAL_CLIPS = {
    "none": None,
    "fair": LengthFairDualClip(c=0.16),
    "constant": ConstantDualClip(ratio=1.5),
    # A limit below the band's own lower side: pointless, but the formula still says what happens.
    "below-band": LengthFairDualClip(c=0.01, drift=-0.2),
}
LENGTHS = (1, 7, 60)
# Away from every limit above for every length.
LOG_RATIOS = tuple(value / 8 + 0.0137 for value in range(-30, 31))
ADVANTAGES = (-2.5, -0.3, 0.7, 1.9)


def grid() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = list(itertools.product(LOG_RATIOS, LENGTHS, ADVANTAGES))
    s, lengths, advantages = zip(*rows, strict=True)
    return (
        torch.tensor(s, dtype=torch.float64),
        torch.tensor(lengths),
        torch.tensor(advantages, dtype=torch.float64),
    )


def limits(band_name: str, dual_name: str, length: float) -> tuple[float, float, float, float]:
    """(scale, low, high, bound) in plain Python, written from the formulas and not from the band classes."""
    scale = 1.0 / length if band_name == "gspo" else 1.0
    low, high = {
        "fspo": (-0.05 * math.sqrt(length), 0.08 * math.sqrt(length)),
        "fspo-drift": (-0.05 * length**0.6 - 0.01 * length, 0.08 * length**0.6 - 0.01 * length),
        "rloo": (math.log(0.8), math.log(1.3)),
        "gspo": (length * math.log(0.97), length * math.log(1.04)),
    }[band_name]
    bound = {
        "none": math.inf,
        "fair": 0.16 * math.sqrt(length),
        "constant": math.log(1.5) * (length if band_name == "gspo" else 1.0),
        "below-band": 0.01 * math.sqrt(length) - 0.2 * length,
    }[dual_name]
    return scale, low, high, bound


@pytest.mark.parametrize("temper", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dual_name", DUAL_CLIPS)
@pytest.mark.parametrize("band_name", BANDS)
def test_weight_equals_autograd_of_the_min_form(band_name: str, dual_name: str, temper: float) -> None:
    s, lengths, advantages = grid()
    scale, low, high, bound = (
        torch.tensor(column, dtype=torch.float64)
        for column in zip(*(limits(band_name, dual_name, n) for n in lengths.tolist()), strict=True)
    )
    hot = lengths.double() ** temper

    def growth(x: torch.Tensor) -> torch.Tensor:
        """exp(s), or what has the tempered weight as its derivative and is 1 at 0."""
        return 1 + hot * torch.expm1(scale * x / hot)

    x = s.clone().requires_grad_()
    clipped = growth(torch.maximum(torch.minimum(x, high), low)) * advantages
    j = torch.minimum(growth(x) * advantages, clipped)
    j = torch.where(advantages < 0, torch.maximum(j, growth(bound) * advantages), j)
    (derivative,) = torch.autograd.grad(j.sum(), x)

    band, dual = BANDS[band_name], DUAL_CLIPS[dual_name]
    got = sequence_surrogate(s, lengths, advantages, band, dual, temper=temper)
    torch.testing.assert_close(got.objective, j.detach(), rtol=1e-12, atol=1e-12 * temper)
    torch.testing.assert_close(got.weight, derivative, rtol=1e-12, atol=0)
    assert not got.weight.requires_grad and not got.objective.requires_grad
    ratio = torch.where(got.clipped, 0.0, (scale * s / hot).exp())
    torch.testing.assert_close(got.ratio, ratio, rtol=1e-12, atol=0)
    # Every branch was visited, or the comparison says little.
    if band_name != "gspo":
        assert got.clipped_high.any() and got.clipped_low.any() and (~got.clipped).any()
    assert got.dual_clipped.any() == (dual_name != "none")


@pytest.mark.parametrize("temper", [-0.1, 1.1, math.nan])
def test_a_temper_out_of_range_is_refused(temper: float) -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="temper must be from 0 to 1"):
        sequence_surrogate(one, one, one, FSPOBand(c_low=0.1, c_high=0.1), temper=temper)
