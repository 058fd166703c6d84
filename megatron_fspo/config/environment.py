"""The ``environment`` section of the configuration: tools and trajectories of several turns."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_fspo.section import Section


class Environment(Section):
    """Tools and trajectories of several turns. See [trajectories.md](trajectories.md)."""

    name: str | None = Field(
        None,
        description="`calculator`, `python`, `http`, `agent`, or `package.module:function`; default: one "
        "turn per response",
    )
    command: tuple[str, ...] = Field(
        (), description="for `agent`: program and arguments, one process per trajectory"
    )
    url: str | None = Field(None, description="for `http`: the tool server")
    role: str | None = Field(
        None,
        description="chat role of inserted text (`tool`, `user`); default: inserted unchanged",
    )
    turns: PositiveInt = Field(8, description="maximum policy turns per trajectory")
    turn_tokens: PositiveInt | None = Field(
        None, description="longest turn; default: the rest of `rollout.max_response_tokens`"
    )
    context_tokens: PositiveInt | None = Field(
        None,
        description="longest context of a row, prompt included; default: `data.max_prompt_tokens` + "
        "`rollout.max_response_tokens`",
    )
    inserted_tokens: PositiveInt = Field(512, description="longest inserted answer; the rest is cut off")
    workers: PositiveInt = Field(4, description="environment processes per data-parallel rank")
    seconds: PositiveFloat = Field(10.0, description="timeout of an answer; kills its worker or agent")
    variables: tuple[str, ...] = Field(
        (), description="environment variables for tools and agents, beside `PATH` and the like"
    )
    memory_gb: PositiveFloat = Field(1.0, description="memory of a worker beyond its libraries")

    @property
    def most_rows(self) -> int:
        """Maximum number of rows of a trajectory."""
        return 1 if self.name is None else self.turns

    def check(self, *, rewards: Sequence[str], replay: str) -> None:
        """Raise ``ValueError`` for conflicting keys; ``rewards`` are names, ``replay`` is ``moe.replay``."""
        if self.name is None and "environment" in rewards:
            raise ValueError("the reward `environment` needs environment.name")
        if self.name is None and self != Environment():
            raise ValueError("keys of [environment] need environment.name")
        if (self.name == "http") is not (self.url is not None):
            raise ValueError("environment.url goes with environment.name = http: set both or neither")
        if (self.name == "agent") is not bool(self.command):
            raise ValueError("environment.command goes with environment.name = agent: set both or neither")
        if self.name is not None and replay == "rollout":
            raise ValueError("moe.replay = rollout needs responses of one turn: remove environment.name")
