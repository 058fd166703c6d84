"""The analytic weight against two independent derivatives of the published min/max form.

Both oracles are written from the formula, with exp of both sides and a real min and max; the code under test
never evaluates those. Kinks (S exactly on a limit) are left out: there is no derivative there.
"""

import itertools
import math

import pytest
import sympy
import torch

from megatron_fspo.objective import (
    ConstantDualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
    effective_sample_size,
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


@pytest.mark.parametrize("dual_name", DUAL_CLIPS)
@pytest.mark.parametrize("band_name", BANDS)
def test_weight_equals_autograd_of_the_min_form(band_name: str, dual_name: str) -> None:
    s, lengths, advantages = grid()
    scale, low, high, bound = (
        torch.tensor(column, dtype=torch.float64)
        for column in zip(*(limits(band_name, dual_name, n) for n in lengths.tolist()), strict=True)
    )
    x = s.clone().requires_grad_()
    unclipped = torch.exp(scale * x) * advantages
    clipped = torch.exp(scale * torch.maximum(torch.minimum(x, high), low)) * advantages
    j = torch.minimum(unclipped, clipped)
    j = torch.where(advantages < 0, torch.maximum(j, torch.exp(scale * bound) * advantages), j)
    (derivative,) = torch.autograd.grad(j.sum(), x)

    got = sequence_surrogate(s, lengths, advantages, BANDS[band_name], DUAL_CLIPS[dual_name])
    torch.testing.assert_close(got.objective, j.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(got.weight, derivative, rtol=1e-12, atol=0)
    assert not got.weight.requires_grad and not got.objective.requires_grad
    # Every branch was visited, or the comparison says little.
    if band_name != "gspo":
        assert got.clipped_high.any() and got.clipped_low.any() and (~got.clipped).any()
    assert got.dual_clipped.any() == (dual_name != "none")


def test_weight_equals_a_symbolic_derivative() -> None:
    """Symbolic: differentiate Max(Min(e^s·A, e^clip·A), e^b·A) branch by branch, evaluate off the kinks."""
    s, a, scale, low, high, bound = sympy.symbols("s a scale low high bound", real=True)
    clip = sympy.Min(sympy.Max(s, low), high)
    pessimistic = sympy.Min(sympy.exp(scale * s) * a, sympy.exp(scale * clip) * a)
    dual = sympy.Max(pessimistic, sympy.exp(scale * bound) * a)
    symbols = (s, a, scale, low, high, bound)
    objective, derivative = {}, {}
    for name, expression in (("plain", pessimistic), ("dual", dual)):
        branches = expression.rewrite(sympy.Piecewise)
        objective[name] = sympy.lambdify(symbols, expression, "math")
        derivative[name] = sympy.lambdify(symbols, branches.diff(s), "math")

    x, lengths, advantages = grid()
    for band_name, dual_name in itertools.product(BANDS, ("none", "fair", "constant")):
        got = sequence_surrogate(x, lengths, advantages, BANDS[band_name], DUAL_CLIPS[dual_name])
        rows = zip(
            x.tolist(),
            lengths.tolist(),
            advantages.tolist(),
            got.objective.tolist(),
            got.weight.tolist(),
            strict=True,
        )
        for value, length, advantage, j, weight in rows:
            form = "dual" if advantage < 0 and dual_name != "none" else "plain"
            point = (value, advantage, *limits(band_name, dual_name, length))
            assert j == pytest.approx(objective[form](*point), rel=1e-12), point
            assert weight == pytest.approx(derivative[form](*point), rel=1e-12, abs=0), point


def test_gradient_of_the_parameters_is_that_of_the_objective() -> None:
    """weight·∇S against autograd through a model: per-token log-probs of a small softmax policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 17, 40, 8, 25, 1])
    tokens = torch.randint(5, (6, 40), generator=generator)
    mask = torch.arange(40) < lengths[:, None]
    features = torch.randn(6, 40, 4, dtype=torch.float64, generator=generator)
    old = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0, -0.1], dtype=torch.float64)
    theta = (old + 0.03 * torch.randn(4, 5, dtype=torch.float64, generator=generator)).requires_grad_()

    def sums(parameters: torch.Tensor) -> torch.Tensor:
        log_probs = (features @ parameters).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        return torch.where(mask, log_probs, 0.0).sum(1)

    band = FSPOBand(c_low=0.03, c_high=0.03)
    width = 0.03 * lengths.double().sqrt()
    log_ratio = sums(theta) - sums(old)
    j = torch.minimum(
        log_ratio.exp() * advantages, torch.clamp(log_ratio, -width, width).exp() * advantages
    ).mean()
    (expected,) = torch.autograd.grad(j, theta, retain_graph=True)

    got = sequence_surrogate(log_ratio, lengths, advantages, band)
    assert 0 < got.clipped.sum() < 6
    (actual,) = torch.autograd.grad((got.weight * log_ratio).sum() / 6, theta)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("temper", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dual_name", DUAL_CLIPS)
@pytest.mark.parametrize("band_name", BANDS)
def test_a_tempered_weight_is_the_derivative_of_its_objective(
    band_name: str, dual_name: str, temper: float
) -> None:
    s, lengths, advantages = grid()
    band, dual = BANDS[band_name], DUAL_CLIPS[dual_name]
    got = sequence_surrogate(s, lengths, advantages, band, dual, temper=temper)
    plain = sequence_surrogate(s, lengths, advantages, band, dual)
    # What is decided is the band's business.
    for flag in ("clipped_low", "clipped_high", "dual_clipped", "below", "above"):
        assert torch.equal(getattr(got, flag), getattr(plain, flag))
    scale, hot = band.log_ratio_scale(lengths.double()), lengths.double() ** temper
    ratio = (scale * s / hot).exp()
    kept = ~got.clipped
    torch.testing.assert_close(got.ratio[kept], ratio[kept], rtol=1e-12, atol=0)
    torch.testing.assert_close(got.weight[kept], (scale * ratio * advantages)[kept], rtol=1e-12, atol=0)
    assert not got.weight[~kept].any() and not got.ratio[~kept].any()
    # dJ/dS by central differences, where both sides are inside.
    step = 1e-5
    sides = [sequence_surrogate(s + d, lengths, advantages, band, dual, temper=temper) for d in (step, -step)]
    smooth = kept & ~sides[0].clipped & ~sides[1].clipped
    slope = (sides[0].objective - sides[1].objective) / (2 * step)
    torch.testing.assert_close(slope[smooth], got.weight[smooth], rtol=1e-5, atol=1e-7)


def test_tempering_leaves_the_gradient_at_zero_and_evens_out_the_weights() -> None:
    """In pure noise of 0.015 per token the weights of 16k tokens have an effective sample size of a few %."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(50_000, generator=generator, dtype=torch.float64) * 0.015
    a = torch.where(torch.rand(50_000, generator=generator) < 0.5, 1.0, -1.0).double()
    band, dual = FSPOBand(c_low=0.03, c_high=0.03), LengthFairDualClip(c=0.06)

    def ess(length: int, temper: float) -> float:
        lengths = torch.full_like(a, length)
        s = noise * length**0.5 - 0.015**2 * length / 2
        return effective_sample_size(sequence_surrogate(s, lengths, a, band, dual, temper=temper).ratio)

    assert ess(100, 0.0) > 0.95 and ess(16_384, 0.0) < 0.06
    assert ess(16_384, 0.5) > 0.9
    zero, lengths = torch.zeros_like(a), torch.full_like(a, 16_384)
    assert torch.equal(sequence_surrogate(zero, lengths, a, band, dual, temper=0.5).weight, a)


@pytest.mark.parametrize("temper", [-0.1, 1.1, math.nan])
def test_a_temper_out_of_range_is_refused(temper: float) -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="temper must be from 0 to 1"):
        sequence_surrogate(one, one, one, FSPOBand(c_low=0.1, c_high=0.1), temper=temper)
