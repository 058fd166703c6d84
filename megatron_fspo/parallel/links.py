"""Process groups beside the job's own: of the trainer's first rank and the workers of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

Join = Callable[[Store, int, int, timedelta], Any]
"""(store, rank, size, timeout) → a process group, which exists once all ranks have called this."""


def join_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group that sends through CPUs and TCP."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def join_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group that sends from GPU to GPU."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
