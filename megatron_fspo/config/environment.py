"""The ``environment`` section of the configuration: tools, and trajectories of several turns."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_fspo.losses.section import Section


class Environment(Section):
    """What answers the turns of the policy. See [trajectories.md](trajectories.md)."""

    name: str | None = Field(
        None,
        description="`calculator`, `python`, or `package.module:function`; default: none, a response is one "
        "turn",
    )
    role: str | None = Field(
        None,
        description="of the chat template, such as `tool` or `user`, for what is inserted; default: it is "
        "inserted as it is",
    )
    turns: PositiveInt = Field(8, description="of the policy in a trajectory, at most")
    turn_tokens: PositiveInt | None = Field(
        None, description="longest turn; default: what is left of `rollout.max_response_tokens`"
    )
    inserted_tokens: PositiveInt = Field(512, description="of one answer; the rest is cut off")
    workers: PositiveInt = Field(4, description="processes that answer, for each data-parallel rank")
    seconds: PositiveFloat = Field(10.0, description="longest time of one answer; its worker is then killed")
    memory_gb: PositiveFloat = Field(1.0, description="of a worker, beyond what its libraries take")

    @model_validator(mode="after")
    def _keys_need_a_name(self) -> Environment:
        if self.name is None and (given := sorted(self.model_fields_set - {"name"})):
            raise ValueError(f"environment.{given[0]} does nothing without environment.name")
        return self
