"""Sums that come out the same to the last bit, whatever the order of their terms and wherever these lie.

Floating-point addition rounds, so a sum depends on its order; CUDA's ``index_add_`` adds in any order, and
each rank of a model in another. What a clip decides on must not. So each value becomes an integer number of
2⁻⁶⁰, in four digits of 28 bits; integers add up exactly; and the total is rounded once, at the end::

    x = d₀·2²⁴ + d₁·2⁻⁴ + d₂·2⁻³² + d₃·2⁻⁶⁰          |d| <= 2²⁸

- **Resolution.** A value is rounded to a multiple of 2⁻⁶⁰ ≈ 9e-19: no error at all for fp32 values from 2⁻³⁷
  ≈ 7e-12 on, and for the others one of at most 2⁻⁶¹ each, always the same. The total is within 1 ulp of the
  exact sum of those in float64; in fp32 that is the correctly rounded sum, but for ties in float64.
- **Range.** |x| < 2⁵² ≈ 4.5e15. What is larger counts as infinite; infinite values and NaN are counted on the
  side, and make the sum what they make of a floating-point sum. A digit's sum is an int64 and overflows after
  2³⁴ terms, the counts after 2³¹: more than any sequence has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_BITS = 28
_UNITS = (2.0**24, 2.0**-4, 2.0**-32, 2.0**-60)
_LARGEST = 2.0**52
_MINUS = 1 << 31
"""What an infinity below zero counts; one above counts 1, and NaN is both."""


class ExactSums:
    """k · n sums under construction; memory [5, k, n] int64, whatever the number of terms.

    Args:
        rows, columns: k and n.
    """

    def __init__(self, rows: int, columns: int, *, device: torch.device) -> None:
        self._digits = torch.zeros(len(_UNITS) + 1, rows, columns, dtype=torch.int64, device=device)

    def add(self, values: Tensor, column: Tensor) -> None:
        """Add values [k, t], floating, to the sums of their columns [t]."""
        self._digits.index_add_(2, column, digits_of(values))

    def total(self, group: dist.ProcessGroup) -> Tensor:
        """The sums [k, n] over all ranks of the group, float64, the same bits on each. One all-reduce."""
        return rounded(added_up(self._digits, group))


def added_up(digits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums of :func:`digits_of` over all ranks of the group, in place."""
    if group.size() > 1:
        dist.all_reduce(digits, group=group)
    return digits


def digits_of(values: Tensor) -> Tensor:
    """Floating [...] → int64 [5, ...]: the digits, and a count of what is not finite. They add up exactly."""
    rest = values.detach().double()
    above, below = ~(rest < _LARGEST), ~(rest > -_LARGEST)  # both for NaN
    rest = torch.where(above | below, 0.0, rest)
    digits = []
    for unit in _UNITS:
        digit = (rest / unit).round()
        rest = rest - digit * unit  # exact: what remains has some of the bits of what was
        digits.append(digit.to(torch.int64))
    return torch.stack([*digits, above.to(torch.int64) + _MINUS * below.to(torch.int64)])


def rounded(digits: Tensor) -> Tensor:
    """Sums of :func:`digits_of` [5, ...] → float64 [...]."""
    *whole, infinite = digits.unbind()
    for i in range(len(whole) - 1, 0, -1):  # carry, so that every digit but the first is small again
        carry = (whole[i] + (1 << (_BITS - 1))) >> _BITS
        whole[i], whole[i - 1] = whole[i] - (carry << _BITS), whole[i - 1] + carry
    first, second, third, fourth = (d.double() * unit for d, unit in zip(whole, _UNITS, strict=True))
    total = (first + second) + (third + fourth)  # neither bracket loses what the last addition would keep
    above, below = infinite % _MINUS > 0, infinite >= _MINUS
    total = torch.where(above, torch.inf, torch.where(below, -torch.inf, total))
    return torch.where(above & below, torch.nan, total)
