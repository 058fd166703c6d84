"""Process groups of the trainer's first rank and vLLM's workers, for weight broadcasts.

Anyone who can reach a group's ports could join it, so they are open on one address per machine only. A member
may die at any time and the others must survive, so all waits have timeouts and ``abort()`` ends pending work.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from megatron_fspo.errors import InputError
from megatron_fspo.parallel.buckets import from_bytes, num_bytes

Join = Callable[[Store, int, int, timedelta, str], Any]
"""(store, rank, size, timeout, IP address of this rank) → process group, once all ranks have called it."""


def join_gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Create a group that communicates through the CPU over TCP, and listens on ``address`` only."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def join_nccl(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Create a group that communicates between GPUs. NCCL selects its address by ``NCCL_SOCKET_IFNAME``.
    Raises ``InputError`` on every rank if NCCL versions differ: NCCL refuses even a different patch
    version."""
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    keys = [f"nccl/{member}" for member in range(size)]
    store.set(keys[rank], version)
    store.wait(keys, timeout)  # NCCL itself would wait forever for a missing rank
    if others := sorted({store.get(key).decode() for key in keys} - {version}):
        differ = f"NCCL {version} here, and {' and '.join(others)} in the group"
        raise InputError(f"vllm.transfer = nccl: {differ}: install torch with the same NCCL on both sides")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Otherwise torch would start a watchdog thread that ends the process if a peer is lost or late. The
    # variable is read when a group is created, so other groups keep their watchdogs.
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable, "0")
    os.environ[variable] = "1"
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ[variable] = before
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this machine only; ``port`` 0: a free one. Raises
    ``OSError`` if it has no such name or address, or the port is in use."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def host_store(host: str, port: int = 0, *, timeout: timedelta) -> TCPStore:
    """Serve a store on the address of :func:`listen`; torch's own would listen on all addresses."""
    listener = listen(host, port)
    ip, port = listener.getsockname()[:2]
    return TCPStore(
        ip, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def address_towards(host: str, port: int) -> str:
    """Return the IP address from which this machine sends to ``host``, without sending. Raises ``OSError`` if
    there is no route."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)
        return str(way.getsockname()[0])


class Receiver:
    """A worker in a group created by ``join``, with the trainer as rank 0. Tensors go to ``device``."""

    def __init__(self, join: Join, device: torch.device) -> None:
        self._join = join
        self._device = device
        self._group: Any = None
        self._meeting: tuple[str, int] | None = None  # address of the group's store

    def connect(
        self, address: str, port: int, *, rank: int, size: int, timeout: timedelta, joined: bool = False
    ) -> None:
        """Leave the previous group and join another. ``timeout`` is for joining and for each broadcast. With
        ``joined``, only check that this worker is in the group. Raises ``RuntimeError`` if it is not, as it
        was restarted or has another trainer."""
        if joined:
            if self._meeting != (address, port):
                raise RuntimeError("this worker is not in the trainer's group")
            return
        self.close()
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        self._group = self._join(store, rank, size, timeout, address_towards(address, port))
        self._meeting, self._timeout = (address, port), timeout

    def buckets(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield the buckets of an update as the trainer sends them. Read each to its end before the next; its
        tensors share memory. A bucket is three messages, uint8 on ``device``: the length of a table (int64; 0
        ends the update); the table, names, dtypes and shapes in JSON; the tensors, packed. Raises
        ``RuntimeError`` if there is no group, a message is late, or a tensor arrives twice."""
        arrived: set[str] = set()
        while length := int(self._receive(8).view(torch.int64)):
            rows = json.loads(bytes(self._receive(length).tolist()))
            names, dtypes, shapes = zip(*rows, strict=True)
            if twice := arrived.intersection(names):
                raise RuntimeError(f"{min(twice)} arrived twice in an update")
            arrived.update(names)
            kinds = [getattr(torch, dtype) for dtype in dtypes]
            yield zip(names, from_bytes(self._receive(num_bytes(kinds, shapes)), kinds, shapes), strict=True)

    def _receive(self, size: int) -> Tensor:
        """Return the trainer's next message, uint8 [size]."""
        if self._group is None:
            raise RuntimeError("weight update before /init_weight_transfer_engine")
        message = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._group.broadcast([message], dist.BroadcastOptions()).wait(self._timeout)
        return message

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
        self._group = self._meeting = None
