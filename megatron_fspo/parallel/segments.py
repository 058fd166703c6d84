"""Sums and prefix sums of per-token numbers along a sequence, also when it lies on several ranks.

They come out the same to the last bit, whatever the order of their terms and wherever these lie.

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

from megatron_fspo.packing.zigzag import chunks_per_sequence

_BITS = 28
_UNITS = (2.0**24, 2.0**-4, 2.0**-32, 2.0**-60)
_LARGEST = 2.0**52
_MINUS = 1 << 31
"""An infinity below zero counts this much; one above counts 1, and NaN is both."""


class ExactSums:
    """k · n sums (rows, columns) under construction; memory [5, k, n] int64, whatever the number of terms."""

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


def sequence_sums(
    values: Tensor, mask: Tensor, segment: Tensor, num_segments: int, *, group: dist.ProcessGroup
) -> Tensor:
    """Σ of the masked values of each sequence, over all context-parallel ranks.

    Exact up to one rounding, see above: the same bits on every rank, in every order, for every split
    of a sequence over ranks. What follows from S is the same wherever the log-ratios are.

    One all-reduce of ``5 · k · num_segments`` integers, whatever the number of tokens. No gradient passes
    through it: the loss uses the sums as constants (a surrogate with detached weights), so the reduction
    needs no backward and brings no factor of the group's size.

    Args:
        values: [k, t] per token; what lies outside the mask may be NaN.
        mask: [t] bool.
        segment: [t] sequence of each token, in [0, num_segments]; the last is nobody's (padding).
        num_segments: number of sequences in the pack.
        group: the context-parallel group.

    Returns:
        [k, num_segments], fp32 (fp64 for fp64 values).
    """
    sums = ExactSums(len(values), num_segments + 1, device=values.device)
    sums.add(torch.where(mask, values, 0.0), segment)
    return sums.total(group)[:, :-1].to(torch.promote_types(values.dtype, torch.float32))


def prefix_sums(
    values: Tensor, mask: Tensor, borders: Tensor, owner: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Σ of the masked values of each token's sequence up to the token, over all context-parallel ranks.

    Exact up to one rounding, as :func:`sequence_sums`. Ranks tell each other the sums of their zigzag chunks:
    one all-reduce of ``10 · k · size · blocks`` integers, whatever the number of tokens.

    Args:
        values: [k, t] per token; what lies outside the mask may be NaN.
        mask: [t] bool.
        borders: [blocks + 1] cumulative padded lengths of blocks, over all ranks: see
            :class:`~megatron_fspo.packing.batch.MicroBatch`.
        owner: [blocks] sequence of each. A sequence's blocks follow each other, perhaps with others between.
        group: the context-parallel group.

    Returns:
        [k, t], fp32 (fp64 for fp64 values); of what is nobody's, anything.
    """
    digits = digits_of(torch.where(mask, values, 0.0))
    size, tokens = group.size(), mask.numel()
    held = borders.long().diff() // size
    block = torch.repeat_interleave(held, output_size=tokens)
    place = torch.arange(tokens, device=mask.device) - (held.cumsum(0) - held)[block]
    # In the later one of the two chunks that this rank holds of the block.
    column = 2 * block + (2 * place >= held[block])
    own = digits.new_zeros(*digits.shape[:2], 2 * len(held)).index_add_(2, column, digits)
    last = max(chunks_per_sequence(size), 2) - 1
    first, second = group.rank(), last - group.rank()
    chunks = digits.new_zeros(last + 1, *digits.shape[:2], len(held))
    chunks[first], chunks[second] = own.view(*own.shape[:2], -1, 2).unbind(-1)
    chunks = added_up(chunks, group)
    earlier = chunks.cumsum(0) - chunks
    before = torch.stack([earlier[first], earlier[second]], dim=-1)
    before += _of_earlier_blocks(chunks.sum(0), owner)[..., None]
    before = before.flatten(2)
    # The running sum of the row begins with the chunks that lie before the token's own in it.
    before -= own.cumsum(2) - own
    sums = rounded(digits.cumsum(2) + before.index_select(2, column))
    return sums.to(torch.promote_types(values.dtype, torch.float32))


def _of_earlier_blocks(totals: Tensor, owner: Tensor) -> Tensor:
    """[..., blocks]: the totals [..., blocks] of earlier blocks of the same owner, added up."""
    owners, order = owner.sort(stable=True)
    sums = totals[..., order].cumsum(-1) - totals[..., order]
    sums = sums - sums[..., torch.searchsorted(owners, owners)]
    return torch.empty_like(sums).index_copy_(-1, order, sums)
