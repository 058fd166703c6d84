"""Exact sums and prefix sums of per-token values over sequences, also if a sequence lies on several ranks.

Results are bit-identical for every order and distribution of the terms. Clip decisions need this, but
floating-point sums depend on their order, which is undefined in CUDA's ``index_add_`` and differs between the
ranks of a model. So each value becomes an integer multiple of 2⁻⁶⁰, in four digits of 28 bits. Integers add
up exactly, and the total is rounded once, at the end::

    x = d₀·2²⁴ + d₁·2⁻⁴ + d₂·2⁻³² + d₃·2⁻⁶⁰          |d| <= 2²⁸

- **Resolution.** Values are rounded to multiples of 2⁻⁶⁰ ≈ 9e-19. fp32 values of at least 2⁻³⁷ ≈ 7e-12 are
  exact; others have a deterministic error of at most 2⁻⁶¹. The float64 total is within 1 ulp of the exact sum
  of the rounded values; in fp32 it is the correctly rounded sum, except for ties in float64.
- **Range.** |x| < 2⁵² ≈ 4.5e15; larger values count as infinite. Infinite values and NaN are counted
  separately, and affect the sum as in floating point. The int64 sum of a digit overflows after 2³⁴ terms, the
  counts after 2³¹: more than any sequence has.
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
"""Count of -inf in the last digit; +inf counts 1, and NaN counts as both."""


class ExactSums:
    """Accumulator of k·n sums (rows × columns): [5, k, n] int64, for any number of terms."""

    def __init__(self, rows: int, columns: int, *, device: torch.device) -> None:
        self._digits = torch.zeros(len(_UNITS) + 1, rows, columns, dtype=torch.int64, device=device)

    def add(self, values: Tensor, column: Tensor) -> None:
        """Add floating-point values [k, t] to the sums of their columns [t]."""
        self._digits.index_add_(2, column, split_digits(values))

    def total(self, group: dist.ProcessGroup) -> Tensor:
        """Return the sums [k, n] over all ranks, float64, the same bits on each. One all-reduce."""
        return rounded(added_up(self._digits, group))


def added_up(digits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the result of :func:`split_digits` over all ranks of the group, in place. Collective."""
    if group.size() > 1:
        dist.all_reduce(digits, group=group)
    return digits


def split_digits(values: Tensor) -> Tensor:
    """Floating-point [...] → int64 [5, ...]: four digits and a count of non-finite values, all additive."""
    rest = values.detach().double()
    above, below = ~(rest < _LARGEST), ~(rest > -_LARGEST)  # NaN is both
    rest = torch.where(above | below, 0.0, rest)
    digits = []
    for unit in _UNITS:
        digit = (rest / unit).round()
        rest = rest - digit * unit  # exact: the difference has a subset of the bits
        digits.append(digit.to(torch.int64))
    return torch.stack([*digits, above.to(torch.int64) + _MINUS * below.to(torch.int64)])


def rounded(digits: Tensor) -> Tensor:
    """Return sums of :func:`split_digits` [5, ...] → float64 [...]."""
    *whole, infinite = digits.unbind()
    for i in range(len(whole) - 1, 0, -1):  # carry, to make every digit but the first small again
        carry = (whole[i] + (1 << (_BITS - 1))) >> _BITS
        whole[i], whole[i - 1] = whole[i] - (carry << _BITS), whole[i - 1] + carry
    first, second, third, fourth = (d.double() * unit for d, unit in zip(whole, _UNITS, strict=True))
    total = (first + second) + (third + fourth)  # the brackets lose no bits that the last addition keeps
    above, below = infinite % _MINUS > 0, infinite >= _MINUS
    total = torch.where(above, torch.inf, torch.where(below, -torch.inf, total))
    return torch.where(above & below, torch.nan, total)


def sequence_sums(
    values: Tensor, mask: Tensor, segment: Tensor, num_segments: int, *, group: dist.ProcessGroup
) -> Tensor:
    """Sum the masked values of each sequence over all context-parallel ranks.

    Exact up to one rounding: bit-identical on every rank and for every split of a sequence. Collective: one
    all-reduce of 5·k·(num_segments + 1) integers. Without gradient: the loss uses the sums as constants (a
    surrogate with detached weights), so the reduction has no backward, and no factor of the group's size.

    Args:
        values: [k, t] per token; may be NaN outside the mask.
        mask: [t] bool.
        segment: [t] sequence of each token, in [0, num_segments]; num_segments is padding.
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
    """For each token, sum the masked values of its sequence up to the token, over all context-parallel ranks.

    Exact up to one rounding, as :func:`sequence_sums`. Collective: one all-reduce of 10·k·size·blocks
    integers, the sums of all zigzag chunks.

    Args:
        values: [k, t] per token; may be NaN outside the mask.
        mask: [t] bool.
        borders: [blocks + 1] cumulative padded lengths of blocks, over all ranks: see
            :class:`~megatron_fspo.packing.batch.MicroBatch`.
        owner: [blocks] sequence of each block. A sequence's blocks are in order, but need not be adjacent.
        group: the context-parallel group.

    Returns:
        [k, t], fp32 (fp64 for fp64 values); undefined for tokens of no sequence.
    """
    digits = split_digits(torch.where(mask, values, 0.0))
    size, tokens = group.size(), mask.numel()
    held = borders.long().diff() // size
    block = torch.repeat_interleave(held, output_size=tokens)
    place = torch.arange(tokens, device=mask.device) - (held.cumsum(0) - held)[block]
    # The odd column is the later one of this rank's two chunks of a block.
    column = 2 * block + (2 * place >= held[block])
    own = digits.new_zeros(*digits.shape[:2], 2 * len(held)).index_add_(2, column, digits)
    last = max(chunks_per_sequence(size), 2) - 1
    first, second = group.rank(), last - group.rank()
    chunks = digits.new_zeros(last + 1, *digits.shape[:2], len(held))
    chunks[first], chunks[second] = own.view(*own.shape[:2], -1, 2).unbind(-1)
    chunks = added_up(chunks, group)
    earlier = chunks.cumsum(0) - chunks
    before = torch.stack([earlier[first], earlier[second]], dim=-1)
    before += _sum_earlier(chunks.sum(0), owner)[..., None]
    before = before.flatten(2)
    # digits.cumsum(2) includes all earlier chunks on this rank; subtract them.
    before -= own.cumsum(2) - own
    sums = rounded(digits.cumsum(2) + before.index_select(2, column))
    return sums.to(torch.promote_types(values.dtype, torch.float32))


def _sum_earlier(totals: Tensor, owner: Tensor) -> Tensor:
    """Sum, for each block, the totals [..., blocks] of earlier blocks of the same owner."""
    owners, order = owner.sort(stable=True)
    sums = totals[..., order].cumsum(-1) - totals[..., order]
    sums = sums - sums[..., torch.searchsorted(owners, owners)]
    return torch.empty_like(sums).index_copy_(-1, order, sums)
