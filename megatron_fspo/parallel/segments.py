"""Sums and prefix sums of per-token numbers along a sequence, also when it lies on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.packing.zigzag import chunks_per_sequence
from megatron_fspo.parallel.exact import ExactSums, added_up, digits_of, rounded


def sequence_sums(
    values: Tensor, mask: Tensor, segment: Tensor, num_segments: int, *, group: dist.ProcessGroup
) -> Tensor:
    """Σ of the masked values of each sequence, over all context-parallel ranks.

    Exact up to one rounding, see :mod:`.exact`: the same bits on every rank, in every order, for every split
    of a sequence over ranks. What follows from S is the same wherever the log-ratios are.

    One all-reduce of ``5 · k · num_segments`` integers, whatever the number of tokens. No gradient passes
    through it: the loss uses the sums as constants (a surrogate with detached weights), so the reduction
    needs no backward and brings no factor of the group's size.

    Args:
        values: [k, t] per token; what lies outside the mask may be NaN.
        mask: [t] bool.
        segment: [t] sequence of each token, in [0, num_segments]; the last is nobody's (padding).
        group: the context-parallel group.

    Returns:
        [k, num_segments], fp32 (fp64 for fp64 values).
    """
    sums = ExactSums(len(values), num_segments + 1, device=values.device)
    sums.add(torch.where(mask, values, 0.0), segment)
    return _like(values, sums.total(group)[:, :-1])


def prefix_sums(
    values: Tensor,
    mask: Tensor,
    segment: Tensor,
    late: Tensor,
    num_segments: int,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Σ of the masked values of each token's sequence up to the token, over all context-parallel ranks.

    Exact up to one rounding, as :func:`sequence_sums`. Ranks tell each other the sums of their zigzag chunks:
    one all-reduce of ``10 · k · size · num_segments`` integers, whatever the number of tokens.

    Args:
        values: [k, t] per token; what lies outside the mask may be NaN.
        mask: [t] bool.
        segment: [t] sequence of each token, in [0, num_segments]; the last is nobody's (padding). Sequences
            lie one after the other, each in the order of its positions.
        late: [t] bool: the token is in the second half of its padded sequence, so in the later one of the two
            chunks that this rank holds of it.
        group: the context-parallel group.

    Returns:
        [k, t], fp32 (fp64 for fp64 values); of what is nobody's, anything.
    """
    digits = digits_of(torch.where(mask, values, 0.0))
    column = 2 * segment + late
    own = digits.new_zeros(*digits.shape[:2], 2 * num_segments + 2).index_add_(2, column, digits)
    last = max(chunks_per_sequence(group.size()), 2) - 1
    held = torch.tensor([group.rank(), last - group.rank()], device=values.device)
    chunks = digits.new_zeros(last + 1, *digits.shape[:2], num_segments + 1)
    chunks[held] = own.unflatten(2, (-1, 2)).movedim(-1, 0)
    before = (added_up(chunks, group).cumsum(0) - chunks)[held].movedim(0, -1).flatten(2)
    # The running sum of the row begins with the chunks that lie before the token's own in it.
    before -= own.cumsum(2) - own
    return _like(values, rounded(digits.cumsum(2) + before.index_select(2, column)))


def _like(values: Tensor, sums: Tensor) -> Tensor:
    return sums.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
