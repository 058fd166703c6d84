"""From per-token numbers to one number per sequence, also when a sequence lies on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.exact import ExactSums


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
    wide = values.dtype == torch.float64
    return sums.total(group)[:, :-1].to(torch.float64 if wide else torch.float32)
