"""Runs one episode of an environment of the `verifiers` package with the policy in training.

    environment.command = [".venv-verifiers/bin/python", "examples/verifiers/agent.py", "retry_sums"]

``environment.name = "agent"`` starts it for each trajectory. The prompt on stdin has the task's number, the
endpoint in ``OPENAI_BASE_URL`` answers with the policy, and the last line printed is the episode's reward.
``--rows FILE`` writes the prompts for the run's data instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import environment_class, load_environment, load_taskset


def load(name: str) -> vf.Env:
    config = environment_class(name).__orig_bases__[0].__args__[0]  # Config of Env[Config]
    return load_environment(config(taskset=vf.TasksetConfig(id=name)))


async def play(name: str, number: int) -> float:
    env = load(name)
    task = next(islice(iter(env.taskset), number, None))
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, ModelContext(model="policy", client=client))
    if not episode.ok:
        raise SystemExit(f"{episode.errors} {[trace.errors for trace in episode.traces]}")
    return sum(trace.reward for trace in episode.traces)


if __name__ == "__main__":
    if sys.argv[2:3] == ["--rows"]:
        rows = [
            {"prompt": task.data.prompt_text, "answer": "(the episode says)", "task": number}
            for number, task in enumerate(load_taskset(vf.TasksetConfig(id=sys.argv[1])))
        ]
        Path(sys.argv[3]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        print(asyncio.run(play(sys.argv[1], json.load(sys.stdin)["fields"]["task"])))
