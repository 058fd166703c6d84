"""Requests of the lane without a GPU, and the one process that answers them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.trace.command import traces
from megatron_fspo.lab.trace.record import Request

EXAMPLES = REPO / "examples"
OLDER = "MEGATRON_CORE_016"
"""The variable that names a folder with megatron-core 0.16."""
SMALL = {
    "data.max_prompt_tokens": 1024,
    "rollout.max_response_tokens": 3072,
    "batch.max_tokens": 4096,
    "rollout.engine": "vllm",
    "vllm.transfer": "gloo",
}
"""One sequence of 4,096 tokens fills a micro-batch: enough for three chunks of the head."""


def request(
    *files: str,
    world: int = 8,
    rank: int = 0,
    layers: int | None = 2,
    experts: int | None = None,
    fault: str | None = None,
    job: str | None = None,
    loss: str | None = None,
    model: str = "qwen3-8b",
    **keys: Any,
) -> Request:
    """The step of a model, cut to some layers; ``keys`` has ``section__key=value``, ``loss`` a loss with its
    own limits."""
    changes = SMALL | {name.replace("__", "."): value for name, value in keys.items()}
    overrides = [word for key, value in changes.items() for word in (f"--{key}", _text(value))]
    config = load_config([EXAMPLES / "qwen3_8b" / name for name in ("run.toml", *files)], overrides)
    tree = config.model_dump(mode="json")
    return Request(
        config=tree if loss is None else tree | {"loss": {"name": loss}},
        model=model,
        layers=layers,
        experts=experts,
        world=world,
        rank=rank,
        fault=fault,
        job=job,
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Lane:
    """Answers requests, one after the other, in one process."""

    def __init__(self, *, blackwell: bool, older: bool) -> None:
        self._waiting: deque[Request] = deque()
        paths = [Path(__file__).parent, *([Path(os.environ[OLDER])] if older else [])]
        self._answers = traces(self._requests(), blackwell=blackwell, paths=paths)

    def __call__(self, asked: Request) -> dict[str, Any]:
        self._waiting.append(asked)
        return next(self._answers)

    def _requests(self) -> Iterator[Request]:
        while True:
            yield self._waiting.popleft()


@cache
def lane(*, blackwell: bool = False, older: bool = False) -> Lane:
    """The process of these tests: of which GPUs, and with which megatron-core."""
    return Lane(blackwell=blackwell, older=older)
