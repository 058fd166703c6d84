"""How tensors get to vLLM's workers: broadcast over gloo or NCCL, or as files on a shared disk.

The workers' side is ``rollout.server.inside``. A sender is used by the first rank only; which tensors go
when is :mod:`.update`'s business.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.links import Join, address_towards, is_loopback, join_gloo, join_nccl, listen

Bucket = Sequence[tuple[str, Tensor]]


class Sender(Protocol):
    """One way to the workers."""

    async def connect(self, servers: Sequence[Server]) -> None:
        """Make ``servers`` those that :meth:`send` reaches."""
        ...

    async def send(self, bucket: Bucket) -> None:
        """Have every worker load the tensors; returns when all have."""
        ...

    def close(self) -> None:
        """Let go of groups and files."""
        ...


@dataclass(frozen=True)
class Link:
    """All that one kind of broadcast differs in from another."""

    join: Join
    device: torch.device
    """Where it sends from."""


LINKS = {
    "gloo": Link(join_gloo, torch.device("cpu")),
    "nccl": Link(join_nccl, torch.device("cuda")),
}


class BroadcastSender:
    """Rank 0 of a group with all workers of all servers.

    Args:
        kind: ``gloo`` (through the CPU) or ``nccl``.
        address: name or IP of this machine, as the servers see it. The group listens there, and nowhere else.
            None: the address from which this machine reaches the first server that is elsewhere.
        timeout_seconds: for joining the group and for each broadcast.
    """

    def __init__(self, kind: str, *, address: str | None, timeout_seconds: float = 120.0) -> None:
        self._link = LINKS[kind]
        self._address = address
        self._timeout = timedelta(seconds=timeout_seconds)
        self._servers: Sequence[Server] = ()
        self._group: Any = None

    async def connect(self, servers: Sequence[Server]) -> None:
        self.close()
        sizes = await asyncio.gather(*(_workers(server) for server in servers))
        address = self._address or _address_towards(servers)
        listener = listen(address)
        ip, port = listener.getsockname()[:2]
        store = TCPStore(
            ip,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),  # otherwise it would listen on all addresses
        )
        infos = [
            {
                "master_address": address,
                "master_port": port,
                "world_size": 1 + sum(sizes),
                "rank_offset": offset,
                "timeout_seconds": self._timeout.total_seconds(),
            }
            for offset in accumulate(sizes[:-1], initial=1)
        ]
        joining = asyncio.to_thread(self._link.join, store, 0, 1 + sum(sizes), self._timeout, ip)
        asked = (
            server.post(
                "/init_weight_transfer_engine", {"init_info": info}, timeout=self._seconds, attempts=1
            )
            for server, info in zip(servers, infos, strict=True)
        )
        self._group, *_ = await asyncio.gather(joining, *asked)
        self._servers = servers

    @property
    def _seconds(self) -> float:
        return self._timeout.total_seconds() + 10

    async def send(self, bucket: Bucket) -> None:
        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        asked = (
            server.post("/update_weights", {"update_info": info}, timeout=self._seconds, attempts=1)
            for server in self._servers
        )
        sending = asyncio.to_thread(_broadcast, self._group, self._link.device, bucket)
        await asyncio.gather(sending, *asked)

    def close(self) -> None:
        # A gloo group that is still referenced at the interpreter's exit aborts it now and then.
        self._group = None
        self._servers = ()


def _address_towards(servers: Sequence[Server]) -> str:
    elsewhere = (url for url in (httpx.URL(server.url) for server in servers) if not is_loopback(url.host))
    if (url := next(elsewhere, None)) is None:
        return "127.0.0.1"
    try:
        return address_towards(url.host, url.port or 80)
    except OSError as error:
        raise ServerLost(f"{url}: there is no way to it: {error.strerror or error}") from None


def _broadcast(group: Any, device: torch.device, bucket: Bucket) -> None:
    # The group is an argument: after a failure this thread may still wait while the sender joins another.
    for name, tensor in bucket:
        try:
            group.broadcast([tensor.to(device).contiguous()], dist.BroadcastOptions()).wait()
        except RuntimeError as error:
            first = str(error).split(". ")[0]  # gloo's second sentence wishes good luck
            raise ServerLost(f"the broadcast of {name} failed: {first}") from error


class DiskSender:
    """Safetensors files in a folder that the servers see under the same name; gone once they are loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: Sequence[Server] = ()

    async def connect(self, servers: Sequence[Server]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        await asyncio.gather(
            *(server.post("/init_weight_transfer_engine", {"init_info": {}}) for server in servers)
        )
        self._servers = servers

    async def send(self, bucket: Bucket) -> None:
        path = self._folder.resolve() / f"weights-{uuid.uuid4().hex}.safetensors"
        try:
            # Complete under its name or not there at all.
            partial = path.with_suffix(".partial")
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket}
            await asyncio.to_thread(save_file, tensors, partial, {"format": "pt"})
            partial.rename(path)
            info = {"update_info": {"paths": [str(path)]}}
            await asyncio.gather(
                *(server.post("/update_weights", info, timeout=600, attempts=1) for server in self._servers)
            )
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._servers = ()


async def _workers(server: Server) -> int:
    answer = await server.get("/get_world_size")
    if not isinstance(answer, dict) or type(answer.get("world_size")) is not int:
        raise server.bad_answer("get_world_size", answer, "is not a number of workers")
    return int(answer["world_size"])


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = 256 * 2**20
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in runs of at most ``bucket_bytes``, or one tensor.

    A bucket is emptied when the next is asked for, so no more than one is held, and the tensor after it.
    """
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket.clear()  # the consumer's list
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
        bucket.clear()
