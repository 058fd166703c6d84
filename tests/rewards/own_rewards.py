"""Rewards as a user writes them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable
from typing import Any

from megatron_fspo.types import Completion, Prompt

places = {"now": 0, "most": 0}
_lock = threading.Lock()


def length(prompt: Prompt, completion: Completion, response: str) -> float:
    return float(len(response))


def field(prompt: Prompt, completion: Completion, response: str) -> float:
    return float(prompt.fields["level"])


async def field_awaited(prompt: Prompt, completion: Completion, response: str) -> float:
    await asyncio.sleep(0.01)
    return float(prompt.fields["level"])


def returns_awaitable(prompt: Prompt, completion: Completion, response: str) -> Any:
    return field_awaited(prompt, completion, response)


class Callable:
    async def __call__(self, prompt: Prompt, completion: Completion, response: str) -> float:
        assert asyncio.get_running_loop()
        return float(prompt.fields["level"])


instance = Callable()


def sleeps(prompt: Prompt, completion: Completion, response: str) -> float:
    with _lock:
        places["now"] += 1
        places["most"] = max(places["most"], places["now"])
    time.sleep(float(response))
    with _lock:
        places["now"] -= 1
    return 1.0


async def sleeps_awaited(prompt: Prompt, completion: Completion, response: str) -> float:
    await asyncio.sleep(float(response))
    return 1.0


def raises(prompt: Prompt, completion: Completion, response: str) -> float:
    raise KeyError(response)


async def raises_awaited(prompt: Prompt, completion: Completion, response: str) -> float:
    await asyncio.sleep(0)
    raise KeyError(response)


def exits(prompt: Prompt, completion: Completion, response: str) -> float:
    raise SystemExit(response)


async def exits_awaited(prompt: Prompt, completion: Completion, response: str) -> float:
    raise SystemExit(response)


async def cancels_itself(prompt: Prompt, completion: Completion, response: str) -> float:
    raise asyncio.CancelledError


async def nan_awaited(prompt: Prompt, completion: Completion, response: str) -> float:
    return math.nan


WAITING: list[str] = []
"""What became of calls of ``waits``."""


def waits(prompt: Prompt, completion: Completion, response: str) -> Awaitable[float]:
    """A plain function that gives something to wait for, which does not come."""

    async def wait() -> float:
        WAITING.append("called")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            WAITING.append("cancelled")
            raise
        return 1.0

    return wait()
