"""Exact sums: against exact fractions, and the same bits in every order and every split."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.parallel import segments as exact
from megatron_fspo.parallel.segments import ExactSums

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
# Of every size that counts, and those between which a sum in floating point forgets all but the largest.
NUMBERS = st.one_of(
    st.floats(-(2.0**51), 2.0**51),
    st.floats(-50, 50, width=32),
    st.floats(-1e-6, 1e-6),
    st.sampled_from([2.0**e * s for e in (51, 24, 23, -4, -5, -32, -33, -60, -61) for s in (1, -1)]),
)


def summed(values: Tensor, columns: Tensor, count: int, parts: list[Tensor] | None = None) -> Tensor:
    """[count] sums; in parts that are given as indices."""
    sums = ExactSums(1, count, device=values.device)
    for part in parts if parts is not None else [torch.arange(len(values))]:
        sums.add(values[None, part], columns[part])
    return sums.total(ALONE)[0]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def rounded_to_units(value: float) -> Fraction:
    """To a multiple of 2⁻⁶⁰, half to even: exact, in Python's own numbers."""
    return Fraction(round(Fraction(value) * 2**60), 2**60)


@given(values=st.lists(NUMBERS, max_size=60))
@example(values=[2.0**51] * 3 + [2.0**-60] + [-(2.0**51)] * 3)
@example(values=[1.0, 2.0**-53, 2.0**-60])
@example(values=[-(2.0**-61), 2.0**-61, -(2.0**-60)])
def test_within_an_ulp_of_the_sum_in_fractions(values: list[float]) -> None:
    got = summed(torch.tensor(values, dtype=torch.float64), torch.zeros(len(values), dtype=torch.long), 1)
    want = sum(map(rounded_to_units, values), Fraction(0))
    assert abs(Fraction(got.item()) - want) <= Fraction(math.ulp(float(want)))
    assert abs(Fraction(got.item()) - sum(map(Fraction, values))) <= (
        Fraction(math.ulp(float(want))) + len(values) * Fraction(1, 2**61)
    )


@given(values=st.lists(st.floats(2.0**-37, 2.0**20, width=32).flatmap(lambda x: st.sampled_from([x, -x]))))
def test_sums_of_fp32_are_rounded_correctly(values: list[float]) -> None:
    """All their bits are kept. fsum rounds once to float64, and so does ours, or an ulp from it."""
    got = summed(torch.tensor(values), torch.zeros(len(values), dtype=torch.long), 1)
    want = math.fsum(values)
    assert abs(got.item() - want) <= math.ulp(want)
    single = torch.tensor(want, dtype=torch.float64).float()
    assert abs(got.float() - single).item() <= torch.finfo(torch.float32).eps * abs(want)


@given(
    values=st.lists(st.one_of(NUMBERS, st.just(math.inf), st.just(math.nan)), max_size=40),
    columns=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**31),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_the_same_bits_in_every_order_and_split(
    values: list[float], columns: Any, seed: int, cuts: list[int]
) -> None:
    numbers = torch.tensor(values, dtype=torch.float64)
    column = torch.tensor([columns.randrange(3) for _ in values], dtype=torch.long)
    want = summed(numbers, column, 3)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    edges = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    parts = [order[a:b] for a, b in pairwise(edges)]
    got = summed(numbers, column, 3, parts)
    assert [*map(bits, got.tolist())] == [*map(bits, want.tolist())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_not_finite(dtype: torch.dtype) -> None:
    """As a sum in floating point has it; a value out of range counts as infinite, and spoils no other sum."""
    inf, nan, large = math.inf, math.nan, 2.0**52
    cases = [
        ([1.0, inf], inf),
        ([-inf, 1.0, -inf], -inf),
        ([inf, -inf], nan),
        ([nan, 1.0], nan),
        ([nan, inf], nan),
        ([large, 1.0], inf),
        ([-large, 1.0], -inf),
        ([large / 2, large / 2], large),
        ([1.0, 2.0], 3.0),
        ([], 0.0),
    ]
    values = torch.tensor([x for row, _ in cases for x in row], dtype=dtype)
    columns = torch.tensor([i for i, (row, _) in enumerate(cases) for _ in row])
    got = summed(values, columns, len(cases))
    assert got.dtype == torch.float64
    torch.testing.assert_close(
        got, torch.tensor([want for _, want in cases]).double(), equal_nan=True, rtol=0, atol=0
    )


def test_no_digit_overflows_before_its_2_to_the_34_terms() -> None:
    """The largest digits, as often as is promised; stood in for by digits that were multiplied."""
    largest = math.nextafter(2.0**52, 0)
    # Every digit at its largest, with one sign.
    worst = sum(2.0**27 * unit for unit in exact._UNITS[1:]) + (largest // 2**24) * 2.0**24
    for value in (largest, worst, -worst, 2.0**27 * exact._UNITS[1]):
        digits = exact.split_digits(torch.tensor([value], dtype=torch.float64))
        assert (digits[:-1].abs() <= 2**28).all() and digits[-1] == 0
        total = exact.rounded(digits * 2**34)
        assert total.item() == value * 2.0**34
