"""Trainer and servers on the same GPUs, in turns (``vllm.colocated``).

========  =======================  ==================
turn      the trainer has          servers have
========  =======================  ==================
trainer   everything               nothing
update    its weights              their weights
servers   nothing                  weights, KV cache
========  =======================  ==================

From turn to turn memory is given up before any is taken: a GPU has to hold the largest row, and no sum of
two. Servers give up theirs by vLLM's sleep of level 1, which keeps the weights on the host: whatever fails, a
server that wakes has whole weights, and says of which version. Requests that are under way freeze, and are
computed anew from their tokens.
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
"""Limit for a server to give up its memory or to take it, weights included."""


class Turn(Enum):
    """See the table of the module."""

    TRAINER = "trainer"
    UPDATE = "update"
    SERVERS = "servers"


class Memory(Protocol):
    """Memory of one rank of the trainer (:class:`~megatron_fspo.mcore.offload.Offload`)."""

    def hold(self, *, weights: bool, rest: bool) -> None:
        """Have the weights on the device, and the rest, or not. Not collective."""
        ...


async def sleep(servers: Sequence[Server]) -> None:
    """Have the servers give up their memory; a server that is gone has none.

    Raises:
        TrainingError: one that is there did not.
        Refused: it has no such route.
    """
    await asyncio.gather(*(_sleep(server) for server in servers))


async def _sleep(server: Server) -> None:
    try:
        await server.post("/sleep", params={"level": "1", "mode": "keep"}, timeout=SECONDS)
        asleep = await server.get("/is_sleeping")
    except Refused as error:
        needs = "vllm.colocated needs a server of `megatron-fspo serve --colocated`"
        raise Refused(f"{error}; {needs}") from None
    except ServerLost as error:
        if not await server.healthy():
            return
        raise TrainingError(f"{error}: it still has its GPU's memory, which training needs") from error
    if asleep != {"is_sleeping": True}:
        raise server.bad_answer("is_sleeping", asleep, "comes from a server that was told to sleep")


async def wake_weights(servers: Sequence[Server]) -> None:
    """Have the servers take memory for their weights, with the weights in it.

    Raises:
        ServerLost: one did not.
    """
    tags = {"tags": "weights"}
    await asyncio.gather(*(server.post("/wake_up", params=tags, timeout=SECONDS) for server in servers))


async def wake(servers: Sequence[Server]) -> None:
    """Have the servers take all of their memory, and go on with what they were asked; one that does not is
    lost, which whoever waits for its answers will notice."""
    await asyncio.gather(*(_wake(server) for server in servers))


async def _wake(server: Server) -> None:
    with suppress(ServerLost):
        if await server.get("/is_sleeping") != {"is_sleeping": False}:
            await server.post("/wake_up", timeout=SECONDS)
