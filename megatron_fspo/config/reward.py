"""The ``reward`` section of the configuration: the grade of a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from megatron_fspo.losses.section import Section

Extract = Literal["auto", "boxed", "answer_line", "hashes", "last_number", "whole"]
Truncated = Literal["keep", "zero_advantage", "drop"]


class Reward(Section):
    """The grade of a response. See [rewards.md](rewards.md)."""

    name: str = Field(
        description="`math`, `reasoning_gym`, `http`, `exact_match`, `make_sum`, `format`, `environment`, or "
        "`package.module:function`; accuracy is this one's grade"
    )
    weight: Annotated[float, Field(ge=0)] = Field(1.0, description="of that grade in the reward")
    also: Mapping[str, float] = Field(
        {},
        description="further rewards and their weights in the sum: "
        '`{format = 0.1, "my_module:f" = 0.05}`, or `--reward.also.format 0.1`',
    )
    extract: Extract = Field(
        "auto",
        description="where the answer stands in a response: the last `\\boxed{}`, what follows the last "
        "`Answer:` or the last `####`, the last number, or the whole response; auto: the first of the "
        "first three that is there",
    )
    url: str | None = Field(None, description="of the verifier that `http` asks")
    workers: PositiveInt = Field(
        4, description="processes that grade `math` and `reasoning_gym`, for each data-parallel rank"
    )
    seconds: PositiveFloat = Field(
        5.0,
        description="longest time of one grade in a worker, which is then killed, and of one HTTP request",
    )
    memory_gb: PositiveFloat = Field(1.0, description="of a worker, beyond what its libraries take")
    concurrency: PositiveInt | None = Field(
        None,
        description="calls of functions of your own, or HTTP requests, at a time; default 1024 calls and 64 "
        "requests. Async functions have no limit",
    )
    retries: NonNegativeInt = Field(
        4, description="further HTTP requests after a lost connection, a time-out, 429 or 5xx"
    )
    overlong_tokens: NonNegativeInt = Field(
        0,
        description="a penalty grows linearly over the last so many tokens before "
        "`rollout.max_response_tokens` (DAPO's soft overlong punishment); 0: none",
    )
    overlong_penalty: PositiveFloat = Field(
        1.0, description="taken from the reward of a response of `rollout.max_response_tokens`"
    )
    truncated: Truncated = Field(
        "keep",
        description="responses cut at `rollout.max_response_tokens`. keep: as the others; zero_advantage: "
        "they count in their group's mean and teach nothing; drop: not in the mean either",
    )
    max_steps_without_spread: NonNegativeInt = Field(
        10,
        description="an error when in so many steps in a row no two responses to a prompt had different "
        "rewards, so that nothing was learned; 0: never",
    )

    @field_validator("also", mode="before")
    @classmethod
    def _weights_are_numbers(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for name, weight in value.items():
                if isinstance(weight, bool):
                    raise ValueError(f"the weight of {name!r} takes neither true nor false")
                if weight == 0:
                    raise ValueError(f"the weight of {name!r} is 0: leave it out")
        return value

    def check(self, *, max_response_tokens: int) -> None:
        """Raise ``ValueError`` where keys do not agree, also with ``rollout.max_response_tokens``."""
        if self.name in self.also:
            raise ValueError(f"reward.also has {self.name!r}, as reward.name: change reward.weight instead")
        if "http" in self.names and self.url is None:
            raise ValueError("the reward http needs reward.url")
        if self.url is not None and "http" not in self.names:
            raise ValueError(f"reward.url = {self.url} is for reward.name = http, or http in reward.also")
        if self.overlong_tokens > max_response_tokens:
            raise ValueError(
                f"reward.overlong_tokens = {self.overlong_tokens} is more than "
                f"rollout.max_response_tokens = {max_response_tokens}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rewards, the first one first."""
        return (self.name, *self.also)
