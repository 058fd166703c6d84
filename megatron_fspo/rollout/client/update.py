"""New weights for servers that go on serving: pause → start → tensors → finish → reset the cache.

Until :func:`resume` they stay paused, also after a failure: none answers with half of an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_fspo.remote import Loop
from megatron_fspo.rollout.client.senders import Sender, in_buckets
from megatron_fspo.rollout.client.server import Server, ServerLost

CONTROL_SECONDS = 150.0
"""For each step of an update but the tensors; a server that takes longer counts as lost."""


def send_weights(
    servers: Sequence[Server],
    sender: Sender,
    loop: Loop,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
) -> Exception | None:
    """Leave ``servers`` paused with ``version`` of the weights; returns what went wrong, if anything.

    ``tensors`` is a collective of the trainer's ranks, so it is read to its end whatever happens here.
    """
    problem = _attempt(loop, _begin(servers, sender)) if servers else None
    for bucket in in_buckets(tensors):
        if servers and problem is None:
            problem = _attempt(loop, sender.send(bucket))
    sender.close()
    return problem or _attempt(loop, _finish(servers, version))


async def resume(servers: Sequence[Server]) -> None:
    """Serve again."""
    await _all(servers, "/resume")


async def _begin(servers: Sequence[Server], sender: Sender) -> None:
    # Requests under way freeze, and go on with the new weights.
    await _all(servers, "/pause", params={"mode": "keep"})
    await sender.connect(servers)
    await asyncio.gather(*(_start(server) for server in servers))


async def _start(server: Server) -> None:
    try:
        await server.post("/start_weight_update", timeout=CONTROL_SECONDS)
    except ServerLost:  # in the middle of an update that failed: end that one, this one brings every tensor
        await server.post("/finish_weight_update", timeout=CONTROL_SECONDS)
        await server.post("/start_weight_update", timeout=CONTROL_SECONDS)


async def _finish(servers: Sequence[Server], version: int) -> None:
    await _all(servers, "/finish_weight_update", {"weight_version": str(version)})
    # What is cached belongs to the old weights. Frozen requests hold some of it, and vLLM would leave all of
    # it in place for them; so they give theirs up, and compute it again with the new weights.
    answers = await _all(servers, "/reset_prefix_cache", params={"reset_running_requests": "true"})
    for server, answer in zip(servers, answers, strict=True):
        if answer != {"success": True}:
            raise server.bad_answer("reset_prefix_cache", answer, "leaves keys and values of old weights")


async def _all(
    servers: Sequence[Server], route: str, body: Any = None, params: Mapping[str, str] | None = None
) -> list[object]:
    return await asyncio.gather(
        *(server.post(route, body, params=params, attempts=1, timeout=CONTROL_SECONDS) for server in servers)
    )


def _attempt(loop: Loop, work: Any) -> Exception | None:
    try:
        loop.run(work)
    except Exception as error:
        return error
    return None
