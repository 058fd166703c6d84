"""The ``log`` section of the configuration: where numbers go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from megatron_fspo.section import Section


class Log(Section):
    """Besides the console and metrics.jsonl."""

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = Field("megatron-fspo", description="wandb project")
    responses: NonNegativeInt = Field(
        16, description="per evaluation, so many responses kept in samples.jsonl, with their log-probs"
    )
    sequences: NonNegativeInt = Field(
        1024, description="per step, at most so many (L, S, A, clipped) kept for the report's pictures"
    )
