"""The ``log`` section of the configuration: where numbers go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_fspo.section import Section


class Log(Section):
    """Besides the console and metrics.jsonl."""

    wandb: Literal["off", "offline", "online"] = "off"
    entity: str | None = Field(None, description="wandb team or user; default: that of the API key")
    project: str = Field("megatron-fspo", description="wandb project")
    group: str | None = Field(None, description="wandb group, of runs that belong together")
    tags: tuple[str, ...] = Field((), description="wandb tags")
    tensorboard: bool = Field(False, description="event files in tensorboard/ of the run's folder")
    peak_tflops: PositiveFloat | None = Field(
        None,
        description="TFLOP/s of one GPU at most, for perf/mfu; default: by the name of the GPU, in bfloat16; "
        "without either there is no perf/mfu",
    )
    profile: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="first and last step that torch's profiler records, a trace per rank and step"
    )
    responses: NonNegativeInt = Field(
        16, description="per evaluation, so many responses kept in samples.jsonl, with their log-probs"
    )
    sequences: NonNegativeInt = Field(
        1024, description="per step, at most so many (L, S, A, clipped) kept for the report's pictures"
    )

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> Log:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(f"profile = {list(self.profile)}: the first step comes after the last")
        return self
