"""Trainer and servers take turns on the same GPUs (``vllm.colocated``).

========  =======================  ==================
phase     the trainer has          servers have
========  =======================  ==================
trainer   everything               nothing
update    its weights              their weights
servers   nothing                  weights, KV cache
========  =======================  ==================

Memory is released before any is allocated, so a GPU must hold the largest row, not a sum of rows. Servers use
vLLM's sleep level 1, which keeps the weights on the host. So after any failure a server wakes with complete
weights and reports their version. Open requests freeze, and are recomputed from their tokens later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Protocol

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.client.server import Refused, Server, ServerLost

SECONDS = 300.0
"""Time limit for a server to release or allocate its memory, weights included."""


class MemoryPhase(Enum):
    """The rows of the module's table."""

    TRAINER = "trainer"
    UPDATE = "update"
    SERVERS = "servers"


class Memory(Protocol):
    """Memory of one rank of the trainer (:class:`~megatron_fspo.mcore.state.offload.Offload`)."""

    def hold(self, *, weights: bool, rest: bool) -> None:
        """Load weights and rest onto the device, or off it where False. Not collective."""
        ...


async def sleep(servers: Sequence[Server]) -> None:
    """Make the servers release their memory. Lost servers hold none. Raises ``TrainingError`` if a healthy
    server does not, and ``Refused`` if it has no such route."""
    await asyncio.gather(*(_sleep(server) for server in servers))


async def _sleep(server: Server) -> None:
    try:
        await server.post("/sleep", params={"level": "1", "mode": "keep"}, timeout=SECONDS)
        asleep = await server.get("/is_sleeping")
    except Refused as error:
        needs = "vllm.colocated needs a server started by `megatron-fspo serve --colocated`"
        raise Refused(f"{error}; {needs}") from None
    except ServerLost as error:
        if not await server.healthy():
            return
        raise TrainingError(f"{error}: it still holds GPU memory, which training needs") from error
    if asleep != {"is_sleeping": True}:
        raise server.bad_answer("is_sleeping", asleep, "is wrong after a request to sleep")


async def wake_weights(servers: Sequence[Server]) -> None:
    """Make the servers load their weights back into GPU memory. Raises ``ServerLost`` if one does not."""
    tags = {"tags": "weights"}
    await asyncio.gather(*(server.post("/wake_up", params=tags, timeout=SECONDS) for server in servers))


async def wake(servers: Sequence[Server]) -> None:
    """Make the servers allocate all of their memory and continue their requests. Lost servers are ignored
    here; callers that wait for their answers will notice."""
    await asyncio.gather(*(_wake(server) for server in servers))


async def _wake(server: Server) -> None:
    with suppress(ServerLost):
        if await server.get("/is_sleeping") != {"is_sleeping": False}:
            await server.post("/wake_up", timeout=SECONDS)
