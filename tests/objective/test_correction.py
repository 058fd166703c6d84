"""Corrections for the mismatch: against plain arithmetic, and the share that noise alone drops by length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.objective.correction import length_fair_gate, truncated_weight, within_ratio

sums = st.lists(st.floats(-2000, 2000), min_size=1, max_size=20)
BROKEN = [math.nan, math.inf, -math.inf]


@settings(deadline=None)
@given(values=sums, cap=st.floats(0.01, 100))
def test_a_truncated_weight_is_the_ratio_up_to_the_cap(values: list[float], cap: float) -> None:
    got = truncated_weight(torch.tensor(values, dtype=torch.float64), cap).tolist()
    for x, weight in zip(values, got, strict=True):
        want = cap if x > 700 else min(math.exp(x), cap)
        assert weight == pytest.approx(want, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_overflows_and_nothing_that_overflows_becomes_0(dtype: torch.dtype) -> None:
    x = torch.tensor([800.0, 1e30, math.log(2), 0.0, -800.0, *BROKEN], dtype=dtype)
    got = truncated_weight(x, 2.0)
    assert got.dtype == dtype
    assert got.tolist() == pytest.approx([2, 2, 2, 1, 0, 0, 0, 0], rel=1e-6)


@settings(deadline=None)
@given(values=sums, low=st.floats(1e-3, 1), high=st.floats(1, 1e3))
def test_a_sequence_is_kept_within_the_limits_of_its_ratio(
    values: list[float], low: float, high: float
) -> None:
    got = within_ratio(torch.tensor(values, dtype=torch.float64), low, high).tolist()
    assert got == [math.log(low) <= x <= math.log(high) for x in values]


@settings(deadline=None)
@given(values=sums, length=st.integers(1, 100_000), c=st.floats(1e-4, 10))
def test_the_gate_opens_as_the_root_of_the_length(values: list[float], length: int, c: float) -> None:
    lengths = torch.full((len(values),), length)
    got = length_fair_gate(torch.tensor(values, dtype=torch.float64), lengths, c).tolist()
    assert got == [abs(x) <= c * math.sqrt(length) for x in values]


def test_what_is_not_finite_is_kept_by_no_rule() -> None:
    x, lengths = torch.tensor(BROKEN), torch.tensor([5, 5, 5])
    assert not within_ratio(x, 0.5, 2.0).any()
    assert not length_fair_gate(x, lengths, 1e9).any()


def rejected(kept: torch.Tensor) -> float:
    return 1 - kept.double().mean().item()


def test_the_share_of_noise_that_is_dropped_by_length() -> None:
    """The gate drops the same at every length; a limit on the sum, long ones; one on the mean, short ones."""
    lengths, sigma, want = (10, 30, 100, 300, 1000, 3000, 10_000), 0.02, 1 - math.erf(2 / math.sqrt(2))
    generator = torch.Generator().manual_seed(0)
    sums = [(torch.randn(1000, n, generator=generator) * sigma).double().sum(1) for n in lengths]
    for n, x in zip(lengths, sums, strict=True):
        rate = rejected(length_fair_gate(x, torch.full_like(x, n), 2 * sigma))
        assert rate == pytest.approx(want, abs=4 * math.sqrt(want * (1 - want) / 1000)), n
    by_sum = [rejected(within_ratio(x, 0.5, 2.0)) for x in sums]
    # As strict as the sum's at 300 tokens. No rule of ours: what others use, to see what it would do.
    by_mean = [rejected((x / n).abs() <= math.log(2) / 300) for n, x in zip(lengths, sums, strict=True)]
    assert by_sum == sorted(by_sum) and by_mean == sorted(by_mean, reverse=True)
    assert by_sum[0] == by_mean[-1] == 0 and min(by_sum[-1], by_mean[0]) > 0.6
    assert by_sum[3] == by_mean[3] == pytest.approx(0.045, abs=0.02)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_limits_that_make_no_sense_are_refused(value: float) -> None:
    x, lengths = torch.zeros(1), torch.ones(1)
    with pytest.raises(ValueError, match="cap must be finite and above 0"):
        truncated_weight(x, value)
    with pytest.raises(ValueError, match="low must be finite and above 0"):
        within_ratio(x, value, 2.0)
    with pytest.raises(ValueError, match="high must be finite and above 0"):
        within_ratio(x, 0.5, value)
    with pytest.raises(ValueError, match="c must be finite and above 0"):
        length_fair_gate(x, lengths, value)
    with pytest.raises(ValueError, match="low must not be above high"):
        within_ratio(x, 2.0, 0.5)
