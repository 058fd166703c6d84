"""An environment of the `verifiers` package: sums, with further tries after a wrong answer.

Taskset, environment and harness follow that package; nothing here depends on megatron_fspo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

TRIES = 3


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    pass


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for left in range(2, 10):
            for right in range(2, 10):
                question = f"What is {left} + {right}? Say the number only."
                yield SumTask(SumData(prompt=question, total=left + right), self.config.task)


class SumEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class SumEnv(vf.Env[SumEnvConfig]):
    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        reward = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for tries in range(1, TRIES + 1):
                numbers = re.findall(r"\d+", segment.last_reply or "")
                if numbers and int(numbers[-1]) == task.data.total:
                    reward = 1.0 / tries
                    break
                if segment.terminated or tries == TRIES:
                    break
                segment = await interaction.turn("That is wrong. Try again.")
        interaction.trace.record_reward("solved", reward, 1.0)


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Runs the chat in this process, without a separate program."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        talk = [m if isinstance(m, dict) else {"role": m.role, "content": m.content} for m in messages]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=talk)
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["InProcess", "SumEnv", "SumTaskset"]
