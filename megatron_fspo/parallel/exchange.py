"""Arrays that change ranks: straight from who has them to who needs them, without pickles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(
    parts: Sequence[Sequence[Tensor]], dtype: torch.dtype, *, group: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Give every rank of the group its part. Collective: one all-to-all, and one of the sizes before it.

    Copies what is sent once, and what is received not at all.

    Args:
        parts: what goes to each rank of the group: any number of rows, of one dimension and any lengths.
        dtype: of the rows.

    Returns:
        all that this rank was given, one rank's after the other's, on the CPU; and how much from each.
    """
    together = torch.cat([torch.zeros(0, dtype=dtype), *(row for part in parts for row in part)])
    if group.size() == 1:
        return together, [len(together)]
    device = _device_of(group)
    sizes = torch.tensor([sum(len(row) for row in part) for part in parts], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    counts = coming.tolist()
    together = together.to(device)
    received = together.new_empty(sum(counts))
    dist.all_to_all_single(received, together, counts, sizes.tolist(), group=group)
    return received.cpu(), counts


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of its collectives have to be."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
