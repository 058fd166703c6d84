"""A training run with a reward that goes wrong, in a way that its name tells.

reward_worker.py ARGUMENTS of ``train``...: with ``--reward.name reward_worker:raises``, say.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_fspo.rewards.make_sum import make_sum
from megatron_fspo.types import Completion, Prompt


def _failing(fail: Callable[[], Any], *, rank: str, version: int) -> Callable[..., Any]:
    """make_sum, but on one rank and for responses of one version of the weights."""

    def reward(prompt: Prompt, completion: Completion, response: str) -> Any:
        if os.environ["RANK"] == rank and completion.weight_version == version:
            return fail()
        return make_sum(prompt, completion, response)

    return reward


raises = _failing(lambda: [1] + 1, rank="1", version=1)  # type: ignore[operator]

loops = _failing(lambda: loops_always(), rank="1", version=1)
nan_in_evaluation = _failing(lambda: math.nan, rank="0", version=2)


def sound(prompt: Prompt, completion: Completion, response: str) -> float:
    """The same without a fault."""
    return make_sum(prompt, completion, response)


def always_half(prompt: Prompt, completion: Completion, response: str) -> float:
    """A verdict that teaches nothing."""
    return 0.5


def loops_always(*_: object) -> None:
    """One that computes without end."""
    while True:
        pass


def sleeps(prompt: Prompt, completion: Completion, response: str) -> None:
    """One that waits without end."""
    time.sleep(3600)


def raises_behind(prompt: Prompt, completion: Completion, response: str) -> float:
    """No verdict on the first response, and an error on the second."""
    return 1 / (len(response) - 2) if len(response) > 1 else time.sleep(3600)  # type: ignore[return-value]


async def sleeps_awaited(prompt: Prompt, completion: Completion, response: str) -> None:
    """The same on the event loop."""
    await asyncio.sleep(3600)


async def blocks_the_loop(prompt: Prompt, completion: Completion, response: str) -> None:
    """An async one that must not."""
    time.sleep(3600)


def holds_the_gil(*_: object) -> None:
    """One that computes without end in C."""
    re.match("(a+)+$", "a" * 64 + "b")


if __name__ == "__main__":
    from megatron_fspo.cli import main  # not above: the process of rewards starts fast

    sys.exit(main(["train", *sys.argv[1:]]))
