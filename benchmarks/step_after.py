"""One step of this checkout but for the model, for benchmarks/step_overhead.py; as the trainer takes it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_fspo.config import Reward
from megatron_fspo.packing import pack
from megatron_fspo.rewards import Grader
from megatron_fspo.trainer import rollout, sampling
from megatron_fspo.trainer.begin import score_old
from megatron_fspo.trainer.metrics import update_metrics
from megatron_fspo.trainer.optimize import Step, optimize
from megatron_fspo.trainer.rollout import Rollout, staleness_metrics
from megatron_fspo.types import Completion, Prompt
from step_synthetic import Clock


def wrap(clock: Clock) -> None:
    """Time what is done inside of other phases."""
    clock.wrap(rollout, "_spread", "exchange")
    clock.wrap(pack, "collate", "collate")


def alternating(prompt: Prompt, completion: Completion, response: str) -> float:
    """The reward: no prompt without a spread, whose responses would be left out."""
    return float(next(_TURNS[prompt.index]) % 2)


_TURNS: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
_GRADER = Grader(Reward(name="step_after:alternating"), max_response_tokens=1 << 20)


def ask(inputs: Any, engine: Any, groups: Any, prompts: Any, params: Any) -> Any:
    """Ask for responses; the first rank grades, as with servers."""
    grader = _GRADER if dist.get_rank() == 0 else None
    return sampling.ask(inputs, engine, groups, grader, prompts, params)


def collect(run: Any, batch: Any, clock: Clock) -> Rollout:
    """The responses, graded."""
    with clock("grade"):
        graded = sampling.collect_and_grade(run.inputs, run.groups, batch)
        return sampling.add_advantages(run.inputs, run.groups, graded)


def step(run: Any, responses: Rollout, clock: Clock) -> dict[str, float]:
    """From responses to metrics."""
    with clock("grade"):
        metrics = rollout.sampling_metrics(responses) | staleness_metrics(responses, run.step, limit=0)
    with clock("plan"):
        packs, sizes = rollout.make_mini_batches(run.inputs.config, responses, run.groups, run.layout)
    responses = replace(responses, held={}, grades={})
    with clock("mismatch"):
        work = Step(rollout=responses, packs=packs, sizes=sizes, metrics=metrics, warm=True)
        score_old(run, work)
    with clock("records"):
        optimize(run, work)
        return work.metrics | update_metrics(run, work)
