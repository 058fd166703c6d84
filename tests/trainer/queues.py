"""Rollout queues over an engine that writes down what it is asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.trainer.sampling import RolloutQueue
from megatron_fspo.types import Prompt, SamplingParams


class Engine:
    """Writes down what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        """The prompts of all ranks, and the seed."""
        self.mine: list[list[int]] = []
        """The prompts of this rank."""
        self.params: list[SamplingParams] = []

    def submit(self, prompts: list[Prompt], params: SamplingParams, mine: range, arrived: None) -> object:
        self.asked.append(([prompt.index for prompt in prompts], params.seed))
        self.mine.append([prompts[position].index for position in mine])
        self.params.append(params)
        return None


def make(
    staleness: int,
    step: int = 0,
    state: dict[str, Any] | None = None,
    *,
    size: int = 3,
    steps: int = 8,
    sets: list[tuple[str, int, float]] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[RolloutQueue, Engine]:
    """A queue of a run of so many steps, ``size`` prompts each; ``state``: of the prompts, to go on from."""
    sets = sets or [("", 10, 1.0)]
    groups: Any = SimpleNamespace(dp=SimpleNamespace(rank=lambda: rank, size=lambda: ranks))
    rollout = dict(temperature=1.0, top_p=1.0, max_response_tokens=4, max_staleness=staleness, stop=())
    rollout |= dict(prompts=size, samples=2)
    config = SimpleNamespace(rollout=SimpleNamespace(**rollout), run=SimpleNamespace(seed=7, steps=steps))
    train = [
        Prompt(index=i, token_ids=(i,), text="", answer="") for i in range(sum(count for _, count, _ in sets))
    ]
    inputs: Any = SimpleNamespace(config=config, train=train, stop_token_ids=(9,), decode=None)
    prompts = PromptCursor(sets, seed=7, size=size)
    if state is not None:
        prompts.load_state_dict(json.loads(json.dumps(state)))
    engine: Any = Engine()
    return RolloutQueue(inputs, engine, groups, None, prompts, step), engine
