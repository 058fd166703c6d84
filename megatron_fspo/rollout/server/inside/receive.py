"""The workers' end of a broadcast from the trainer: store, group, tensors. Needs torch only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from megatron_fspo.rollout.links import Join, address_towards


class Receiver:
    """One worker's place in the group whose rank 0 is the trainer.

    Args:
        join: makes the group.
        device: where tensors arrive.
    """

    def __init__(self, join: Join, device: torch.device) -> None:
        self._join = join
        self._device = device
        self._group: Any = None

    def connect(self, address: str, port: int, *, rank: int, size: int, timeout: timedelta) -> None:
        """Join the group; ``timeout`` is for that and for every broadcast. What was joined before ends."""
        self.close()
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        self._group = self._join(store, rank, size, timeout, address_towards(address, port))

    def tensors(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, Tensor]]:
        """What the trainer broadcasts now, in this order; one at a time in memory.

        Raises:
            RuntimeError: no group, or no tensor in time.
        """
        if self._group is None:
            raise RuntimeError("weight update before /init_weight_transfer_engine")
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
            yield name, tensor

    def close(self) -> None:
        """Leave the group."""
        self._group = None
