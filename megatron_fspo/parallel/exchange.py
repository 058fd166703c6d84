"""Arrays that change ranks: straight from who has them to who needs them, without pickles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(parts: Sequence[Tensor], *, group: dist.ProcessGroup) -> list[Tensor]:
    """Give every rank of the group its part. Collective: one all-to-all, and one of the sizes before it.

    Args:
        parts: what goes to each rank of the group; one dimension, any lengths, one dtype everywhere.

    Returns:
        what each rank of the group gave this one, on the CPU.
    """
    if group.size() == 1:
        return [parts[0]]
    device = _device_of(group)
    sizes = torch.tensor([len(part) for part in parts], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    counts = coming.tolist()
    together = torch.cat([*parts]).to(device)
    received = together.new_empty(sum(counts))
    dist.all_to_all_single(received, together, counts, sizes.tolist(), group=group)
    return list(received.cpu().split(counts))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of its collectives have to be."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
