"""From per-token numbers to one number per sequence, also when a sequence lies on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sequence_sums(
    values: Tensor, mask: Tensor, segment: Tensor, num_segments: int, *, group: dist.ProcessGroup
) -> Tensor:
    """Σ of the masked values of each sequence, over all context-parallel ranks.

    One all-reduce of ``k · num_segments`` floats, whatever the number of tokens. No gradient passes through
    it: the loss uses the sums as constants (a surrogate with detached weights), so the reduction needs no
    backward and brings no factor of the group's size.

    Args:
        values: [k, t] per token; what lies outside the mask may be NaN.
        mask: [t] bool.
        segment: [t] sequence of each token, in [0, num_segments]; the last is nobody's (padding).
        group: the context-parallel group.

    Returns:
        [k, num_segments], fp32 (fp64 for fp64 values).
    """
    values = values.detach()
    values = values if values.dtype == torch.float64 else values.float()
    kept = torch.where(mask, values, 0.0)
    sums = values.new_zeros(len(values), num_segments + 1).index_add_(1, segment, kept)[:, :-1].contiguous()
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums
