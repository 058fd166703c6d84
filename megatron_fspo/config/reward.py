"""The ``reward`` section of the configuration: how responses are graded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from megatron_fspo.section import Section

Extract = Literal["auto", "boxed", "answer_line", "hashes", "last_number", "whole"]
Truncated = Literal["keep", "zero_advantage", "drop"]


class Reward(Section):
    """How responses are graded. See [rewards.md](rewards.md)."""

    name: str = Field(
        description="`math`, `reasoning_gym`, `http`, `exact_match`, `make_sum`, `format`, "
        "`environment`, or `package.module:function`; accuracy is this grade"
    )
    weight: Annotated[float, Field(ge=0)] = Field(1.0, description="weight of that grade")
    also: Mapping[str, float] = Field(
        {},
        description='further rewards and their weights: `{format = 0.1, "my_module:f" = 0.05}`, or '
        "`--reward.also.format 0.1`",
    )
    extract: Extract = Field(
        "auto",
        description="where the answer is (last match); auto: `\\boxed{}`, else after `Answer:`, else "
        "after `####`",
    )
    end_of_thinking: str = Field(
        "</think>",
        description="the answer follows the last such mark, which begins thinking without `/`; empty: off",
    )
    url: str | None = Field(None, description="for `http`: the verifier")
    workers: PositiveInt = Field(
        4, description="grading processes per data-parallel rank, for `math` and `reasoning_gym`"
    )
    seconds: PositiveFloat = Field(
        5.0,
        description="timeout of a grade (its worker is killed) or HTTP request",
    )
    memory_gb: PositiveFloat = Field(1.0, description="memory of a worker beyond its libraries")
    concurrency: PositiveInt | None = Field(
        None,
        description="concurrent calls of your functions (default 1024) or HTTP requests (default 64); "
        "async functions have no limit",
    )
    in_process: bool = Field(False, description="call your functions in the trainer's process")
    retries: NonNegativeInt = Field(
        4, description="HTTP retries after a lost connection, time-out, 429 or 5xx"
    )
    overlong_tokens: NonNegativeInt = Field(
        0,
        description="length of the growing penalty before `rollout.max_response_tokens` (DAPO's soft "
        "overlong punishment)",
    )
    overlong_penalty: PositiveFloat = Field(1.0, description="penalty at `rollout.max_response_tokens`")
    truncated: Truncated = Field(
        "keep",
        description="responses cut at `rollout.max_response_tokens`; zero_advantage: only count in the "
        "group mean; drop: not even there",
    )
    max_zero_variance_steps: NonNegativeInt = Field(
        10,
        description="stop after this many steps in a row with equal rewards in every group; 0: never",
    )

    @field_validator("also", mode="before")
    @classmethod
    def _weights_are_numbers(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for name, weight in value.items():
                if isinstance(weight, bool):
                    raise ValueError(f"the weight of {name!r} must be a number, neither true nor false")
                if weight == 0:
                    raise ValueError(f"the weight of {name!r} is 0: remove it")
        return value

    def check(self, *, max_response_tokens: int) -> None:
        """Raise ``ValueError`` for keys that conflict, also with ``rollout.max_response_tokens``."""
        if self.name in self.also:
            raise ValueError(f"reward.also has {self.name!r}, as reward.name: set reward.weight instead")
        if "http" in self.names and self.url is None:
            raise ValueError("the reward http needs reward.url")
        if self.url is not None and "http" not in self.names:
            raise ValueError(f"reward.url = {self.url} needs reward.name = http, or http in reward.also")
        if self.overlong_tokens > max_response_tokens:
            raise ValueError(
                f"reward.overlong_tokens = {self.overlong_tokens} is more than "
                f"rollout.max_response_tokens = {max_response_tokens}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rewards, ``reward.name`` first."""
        return (self.name, *self.also)
