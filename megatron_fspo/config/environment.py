"""The ``environment`` section of the configuration: tools, and trajectories of several turns."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_fspo.losses.section import Section


class Environment(Section):
    """What answers the turns of the policy. See [trajectories.md](trajectories.md)."""

    name: str | None = Field(
        None,
        description="`calculator`, `python`, `http`, `agent`, or `package.module:function`; default: none, "
        "a response is one turn",
    )
    command: tuple[str, ...] = Field(
        (), description="of `agent`: a program and its words; one runs with each trajectory"
    )
    url: str | None = Field(None, description="of the server of tools that `http` asks")
    role: str | None = Field(
        None,
        description="of the chat template, such as `tool` or `user`, for what is inserted; default: it is "
        "inserted as it is",
    )
    turns: PositiveInt = Field(8, description="of the policy in a trajectory, at most")
    turn_tokens: PositiveInt | None = Field(
        None, description="longest turn; default: what is left of `rollout.max_response_tokens`"
    )
    context_tokens: PositiveInt | None = Field(
        None,
        description="that the model reads and writes at most, the prompt included, from the beginning or "
        "from where the environment forgot; default: `data.max_prompt_tokens` and "
        "`rollout.max_response_tokens` together",
    )
    inserted_tokens: PositiveInt = Field(512, description="of one answer; the rest is cut off")
    workers: PositiveInt = Field(4, description="processes that answer, for each data-parallel rank")
    seconds: PositiveFloat = Field(
        10.0, description="longest time of one answer; its worker, or agent, is then killed"
    )
    memory_gb: PositiveFloat = Field(1.0, description="of a worker, beyond what its libraries take")

    @property
    def most_rows(self) -> int:
        """Rows of a trajectory, at most."""
        return 1 if self.name is None else self.turns

    def check(self, *, rewards: Sequence[str], replay: str) -> None:
        """Raise ``ValueError`` where other keys do not agree: names of rewards, and ``moe.replay``."""
        if self.name is None and "environment" in rewards:
            raise ValueError("the reward `environment` needs environment.name")
        if self.name is None and self != Environment():
            raise ValueError("keys of [environment] need environment.name")
        if (self.name == "http") is not (self.url is not None):
            raise ValueError("environment.url goes with environment.name = http, and the other way round")
        if (self.name == "agent") is not bool(self.command):
            raise ValueError(
                "environment.command goes with environment.name = agent, and the other way round"
            )
        if self.name is not None and replay == "rollout":
            raise ValueError("moe.replay = rollout needs responses of one turn: leave environment.name out")
