"""Rewards as a user writes them."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from array import array
from collections.abc import Awaitable
from typing import Any

from megatron_fspo.types import Completion, Prompt

places = {"now": 0, "most": 0}
_lock = threading.Lock()


def length(prompt: Prompt, completion: Completion, response: str) -> float:
    return float(len(response))


REST = {"large": 10**30, "nested": [{"a": None}, 0.1], "half of a character": "\ud800"}


def field(prompt: Prompt, completion: Completion, response: str) -> float:
    assert isinstance(completion.token_ids, array) and isinstance(completion.log_probs, array)
    assert prompt.fields["rest"] == REST
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


def at_a_time(prompt: Prompt, completion: Completion, response: str) -> float:
    """The most calls at a time so far."""
    sleeps(prompt, completion, response)
    return float(places["most"])


def heavy(prompt: Prompt, completion: Completion, response: str) -> float:
    """How many of the packages that take long are imported."""
    print(response)
    return float(len({"torch", "megatron", "transformers", "pydantic", "httpx"}.intersection(sys.modules)))


def loops(prompt: Prompt, completion: Completion, response: str) -> float:
    """Computes without end for one response, and not at all for others."""
    while response == "loop":
        pass
    return 1.0


def dies(prompt: Prompt, completion: Completion, response: str) -> float:
    """As if C code of a library crashed."""
    os._exit(3) if response == "die" else time.sleep(600)
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


def waits(prompt: Prompt, completion: Completion, response: str) -> Awaitable[float]:
    """A plain function that gives something to wait for, which does not come; the end is told in a file."""

    def tell(word: str) -> None:
        with open(response, "a", encoding="ascii") as file:
            print(word, file=file)

    async def wait() -> float:
        tell("waits")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            tell("cancelled")
            raise
        return 1.0

    return wait()
