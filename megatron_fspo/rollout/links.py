"""Process groups beside the job's own: of the trainer's first rank and the workers of vLLM.

Who reaches the ports of a group could take part in it, so they are open on one address of each machine only.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

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
    """A group that sends from GPU to GPU. NCCL itself chooses where it listens, by ``NCCL_SOCKET_IFNAME``."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of one address of this machine, and on no other.

    Raises:
        OSError: this machine has no such name or address.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine to itself only, as far as its writing tells."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def address_towards(host: str, port: int) -> str:
    """The IP address under which this machine sends to another. Nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)
        return str(way.getsockname()[0])
