"""Updates the weights of running servers: pause → start → tensors → finish → reset the cache → resume.

Tensors are broadcast over gloo or NCCL (one request per server and update), or written to a shared disk (one
per bucket); ``rollout.server.inside`` has the workers' end. Servers stay paused until :func:`resume`, even
after a failure, so that none answers with half of an update.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import traceback
import uuid
from asyncio import FIRST_EXCEPTION
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_fspo.job.remote import Loop
from megatron_fspo.parallel.buckets import in_buckets, to_bytes
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.common import is_loopback
from megatron_fspo.rollout.delta import Changes
from megatron_fspo.rollout.links import address_towards, host_store, join_gloo, join_nccl

CONTROL_SECONDS = 150.0
"""Time limit for each step of an update except the tensors. A server that exceeds it counts as lost."""
LINKS = {"gloo": (join_gloo, torch.device("cpu")), "nccl": (join_nccl, torch.device("cuda"))}
"""Kind of broadcast → function that creates its group, and device to send from."""
Bucket = Sequence[tuple[str, Tensor]]
_UPDATE_SECONDS = 3600.0
"""Time limit for the request of an update. Each broadcast, and the wait after the last, has its own."""


def send_weights(
    servers: Sequence[Server], sender: Sender, loop: Loop, tensors: Iterable[tuple[str, Tensor]], version: int
) -> Exception | None:
    """Pause ``servers`` and send them ``version`` of the weights. Return the error, if any. ``tensors`` is a
    collective of the trainer's ranks, so it is read to its end even after an error."""
    problem = _attempt(loop.run, _begin(servers, sender)) if servers else None
    sending = Future[None]()
    sending.set_result(None)
    try:
        for bucket in chain(in_buckets(tensors), [[]]):  # gathered while the previous one is sent
            problem = problem or _attempt(sending.result)
            if servers and problem is None:
                sending = loop.submit(sender.send(servers, bucket))
        problem = problem or _attempt(sending.result)
    except BaseException:
        if not sending.cancel():
            sender.close()  # else workers would wait for the next bucket
        raise
    return problem or _attempt(loop.run, _finish(servers, version))


def _attempt(work: Callable[..., object], *arguments: object) -> Exception | None:
    try:
        work(*arguments)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # frames hold a bucket
        return error.with_traceback(None)
    return None


async def _begin(servers: Sequence[Server], sender: Sender) -> None:
    # Open requests freeze, and continue with the new weights.
    await _all(servers, "/pause", params={"mode": "keep"})
    await sender.connect(servers)
    await asyncio.gather(*(_start(server) for server in servers))


async def _start(server: Server) -> None:
    try:
        await server.post("/start_weight_update", timeout=CONTROL_SECONDS)
    except ServerLost:  # an earlier update failed halfway: finish it, as this one sends every tensor
        await server.post("/finish_weight_update", timeout=CONTROL_SECONDS)
        await server.post("/start_weight_update", timeout=CONTROL_SECONDS)


async def _finish(servers: Sequence[Server], version: int) -> None:
    await _all(servers, "/finish_weight_update", {"weight_version": str(version)})
    # The cache belongs to the old weights. vLLM would keep all of it while frozen requests hold some, so they
    # release theirs, and recompute it with the new weights.
    answers = await _all(servers, "/reset_prefix_cache", params={"reset_running_requests": "true"})
    for server, answer in zip(servers, answers, strict=True):
        if answer != {"success": True}:
            raise server.bad_answer("reset_prefix_cache", answer, "leaves keys and values of the old weights")


async def resume(servers: Sequence[Server]) -> None:
    """Make the servers continue."""
    await _all(servers, "/resume")


async def _all(servers: Sequence[Server], route: str, body: Any = None, **how: Any) -> list[object]:
    how = {"timeout": CONTROL_SECONDS} | how
    return await asyncio.gather(*(server.post(route, body, **how) for server in servers))


class BroadcastSender:
    """Rank 0 of a group with all workers of all servers.

    Updates share a group. It is aborted and created again if the servers change, one was restarted, or an
    update fails.

    Args:
        kind: ``gloo`` (through the CPU) or ``nccl``.
        address: name or IP of this machine, as the servers see it. The group listens there only. None: the
            address from which this machine reaches the first server on another machine.
        timeout_seconds: time limit for joining the group and for each broadcast.
        delta: send changes since the last update of the same group.
    """

    def __init__(
        self, kind: str, *, address: str | None, timeout_seconds: float = 120.0, delta: bool = False
    ) -> None:
        self._join, self._device = LINKS[kind]
        self._address = address
        self._timeout = timedelta(seconds=timeout_seconds)
        self._answer_seconds = timeout_seconds + 10
        self._delta = delta
        self.changes = Changes()  # for the group's workers
        self.sent_bytes = 0  # in the last update
        self._group: Any = None
        self._members: dict[Server, dict[str, object]] = {}  # of the group, with the request to join
        self._loading: list[asyncio.Task[None]] = []  # a request to each server, open during the update
        atexit.register(self.close)  # a gloo group that is open at exit sometimes aborts the process

    async def connect(self, servers: Sequence[Server]) -> None:
        """Prepare an update of these servers: create a group, unless theirs is intact."""
        self.sent_bytes, self._loading = 0, []
        if list(self._members) == list(servers) and await self._complete():
            return
        await asyncio.to_thread(self.close)
        sizes = await asyncio.gather(*(_workers(server) for server in servers))
        address = self._address or _address_towards(servers)
        store = host_store(address, timeout=self._timeout)
        size = 1 + sum(sizes)
        group = {"master_address": address, "master_port": store.port, "world_size": size}
        group |= {"timeout_seconds": self._timeout.total_seconds(), "delta": self._delta}
        offsets = accumulate(sizes[:-1], initial=1)
        members = {
            server: group | {"rank_offset": offset} for server, offset in zip(servers, offsets, strict=True)
        }
        joining = asyncio.to_thread(self._join, store, 0, size, self._timeout, store.host)
        self._group, _ = await asyncio.gather(joining, self._ask(members))
        self._members = members

    async def _complete(self) -> bool:
        """Return True if every member is still in the group."""
        try:
            await self._ask(self._members, joined=True)
        except ServerLost:
            return False
        return True

    async def _ask(self, members: Mapping[Server, dict[str, object]], **more: object) -> None:
        route, limit = "/init_weight_transfer_engine", self._answer_seconds
        asked = {server: {"init_info": info | more} for server, info in members.items()}
        await asyncio.gather(*(server.post(route, body, timeout=limit) for server, body in asked.items()))

    async def send(self, servers: Sequence[Server], bucket: Bucket) -> None:
        """Send the tensors to every worker. An empty bucket ends the update: return when all have loaded it.
        Raises ``ServerLost`` and closes the group if a server is lost or exceeds the time limit."""
        if not self._loading:
            self._loading = [asyncio.create_task(self._load(server), name=server.url) for server in servers]
            for request in self._loading:  # an error need not be read, as after an interruption
                request.add_done_callback(lambda one: one.cancelled() or one.exception())
        try:
            if any(request.done() for request in self._loading):
                raise ServerLost("a server ended the update before its last bucket")
            if self._delta:
                bucket = await asyncio.to_thread(list, self.changes.encode(bucket))
            self.sent_bytes += sum(tensor.nbytes for _, tensor in bucket)
            await asyncio.to_thread(_broadcast, self._group, self._device, bucket, self._timeout)
            if not bucket:
                limit = self._answer_seconds
                _, late = await asyncio.wait(self._loading, timeout=limit, return_when=FIRST_EXCEPTION)
                for request in late:
                    raise ServerLost(f"{request.get_name()}/update_weights: no answer to the last bucket")
                await asyncio.gather(*self._loading)
            return
        except BaseException as error:
            problem = error
        if isinstance(problem, ServerLost):  # a second, to learn which server was lost
            await asyncio.wait(self._loading, timeout=1, return_when=FIRST_EXCEPTION)
        await asyncio.to_thread(self.close)
        errors = [one.exception() for one in self._loading if one.done() and not one.cancelled()]
        for request in self._loading:
            request.cancel()
        raise next(filter(None, errors), problem)

    async def _load(self, server: Server) -> None:
        """Have a server load all buckets of an update, in one request."""
        try:
            await server.post("/update_weights", {"update_info": {}}, timeout=_UPDATE_SECONDS)
        except Exception:
            # Until the group is aborted, NCCL's kernel waits for the lost rank and blocks the GPU's stream.
            if asyncio.current_task() in self._loading:
                await asyncio.to_thread(self.close)
            raise

    def close(self) -> None:
        """Leave the group and end a running broadcast."""
        group, self._group, self._members, self.changes = self._group, None, {}, Changes()
        if group is not None:
            group.abort()


async def _workers(server: Server) -> int:
    answer = await server.get("/get_world_size")
    if not isinstance(answer, dict) or type(answer.get("world_size")) is not int:
        raise server.bad_answer("get_world_size", answer, "is not a number of workers")
    return int(answer["world_size"])


def _address_towards(servers: Sequence[Server]) -> str:
    elsewhere = (url for url in (httpx.URL(server.url) for server in servers) if not is_loopback(url.host))
    if (url := next(elsewhere, None)) is None:
        return "127.0.0.1"
    try:
        return address_towards(url.host, url.port or 80)
    except OSError as error:
        raise ServerLost(f"{url}: there is no route to it: {error.strerror or error}") from None


def _broadcast(group: Any, device: torch.device, bucket: Bucket, timeout: timedelta) -> None:
    # The group is an argument, as this thread may still wait for it when the sender has created another.
    rows = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in bucket]
    table = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
    messages = [torch.tensor([len(table) if bucket else 0]).view(torch.uint8)]
    if bucket:
        messages += [table, to_bytes([tensor for _, tensor in bucket], device)]
    try:
        for message in messages:
            # NCCL's stream waits for the current one. This thread waits for NCCL only with a timeout.
            group.broadcast([message.to(device)], dist.BroadcastOptions()).wait(timeout)
    except RuntimeError as error:
        first = str(error).split(". ")[0]  # without gloo's second sentence, which adds nothing
        names = f"{bucket[0][0]} … {bucket[-1][0]}" if bucket else "the end"
        raise ServerLost(f"the broadcast of {names} failed: {first}") from error


class DiskSender:
    """Sends files in a folder that servers see under the same path, and removes them once they are loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sent_bytes = 0

    async def connect(self, servers: Sequence[Server]) -> None:
        self.sent_bytes = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        await _all(servers, "/init_weight_transfer_engine", {"init_info": {}}, timeout=60)

    async def send(self, servers: Sequence[Server], bucket: Bucket) -> None:
        if not bucket:
            return
        path = self._folder.resolve() / f"weights-{uuid.uuid4().hex}.safetensors"
        self.sent_bytes += sum(tensor.nbytes for _, tensor in bucket)
        try:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket}
            await asyncio.to_thread(save_file, tensors, path, {"format": "pt"})
            await _all(servers, "/update_weights", {"update_info": {"paths": [str(path)]}}, timeout=600)
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing."""


Sender = BroadcastSender | DiskSender
"""Sends weights to the workers, from the first rank."""
