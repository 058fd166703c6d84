"""Process groups of the trainer's first rank and the workers of vLLM: both ends of a broadcast of weights.

Who reaches the ports of a group could take part in it, so they are open on one address of each machine only.
A member may die at any time, and the others have to live on: no wait without a limit, and ``abort()`` ends
what is under way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from megatron_fspo.errors import InputError

Join = Callable[[Store, int, int, timedelta, str], Any]
"""(store, rank, size, timeout, IP address of this rank) → a process group, which exists once all ranks have
called this."""


def join_gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """A group that sends through CPUs and TCP, and listens on ``address`` only."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def join_nccl(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """A group that sends from GPU to GPU. NCCL itself chooses where it listens, by ``NCCL_SOCKET_IFNAME``.

    Raises:
        InputError: on every rank; they have different versions of NCCL, which it refuses, also in the patch.
    """
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    keys = [f"nccl/{member}" for member in range(size)]
    store.set(keys[rank], version)
    store.wait(keys, timeout)  # NCCL itself would wait without a limit for who does not come
    if others := sorted({store.get(key).decode() for key in keys} - {version}):
        differ = f"NCCL {version} here, and {' and '.join(others)} in the group"
        raise InputError(f"vllm.transfer = nccl: {differ}: both sides need the same, as torch brings it")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Else torch makes a watchdog thread for the group, which ends the process for a peer that is lost or
    # late. Read whenever a group is made: all others keep theirs.
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable, "0")
    os.environ[variable] = "1"
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ[variable] = before
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of one address of this machine, and on no other.

    Raises:
        OSError: this machine has no such name or address.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def address_towards(host: str, port: int) -> str:
    """The IP address under which this machine sends to another. Nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)
        return str(way.getsockname()[0])


class Receiver:
    """One worker in the group that ``join`` makes, whose rank 0 is the trainer. Tensors go to ``device``."""

    def __init__(self, join: Join, device: torch.device) -> None:
        self._join = join
        self._device = device
        self._group: Any = None
        self._meeting: tuple[str, int] | None = None  # where the members of the group met

    def connect(
        self, address: str, port: int, *, rank: int, size: int, timeout: timedelta, joined: bool = False
    ) -> None:
        """Join the group; ``timeout`` is for that and for every broadcast. What was joined before ends.

        With ``joined`` only see that this worker is in the group, as the trainer takes it to be.

        Raises:
            RuntimeError: it is not, since it was restarted, or has another trainer.
        """
        if joined:
            if self._meeting != (address, port):
                raise RuntimeError("this worker is not in that group")
            return
        self.close()
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        self._group = self._join(store, rank, size, timeout, address_towards(address, port))
        self._meeting, self._timeout = (address, port), timeout

    def tensors(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what the trainer broadcasts now, in this order; one at a time in memory.

        Raises:
            RuntimeError: no group, or no tensor in time.
        """
        if self._group is None:
            raise RuntimeError("weight update before /init_weight_transfer_engine")
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait(self._timeout)
            yield name, tensor

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
        self._group = self._meeting = None
