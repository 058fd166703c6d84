"""Responses with their verdicts: what the policy writes, scored by the reward, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import gather_lists, share
from megatron_fspo.rollout.engine import Pending, Progress, RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.types import Completion, Prompt, Sample, SamplingParams

Graded = tuple[int, tuple[Completion, ...], tuple[float, ...]]
"""Position of the prompt, its completions, their rewards."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Responses that were asked for."""

    prompts: Sequence[Prompt]
    """Of all ranks."""
    mine: range
    """Positions of this data-parallel rank's prompts."""
    pending: Pending


def ask(
    engine: RolloutEngine, groups: ParallelGroups, prompts: Sequence[Prompt], params: SamplingParams
) -> Batch:
    """Ask for responses to all prompts; each data-parallel rank for its share. Collective."""
    mine = range(groups.dp.rank(), len(prompts), groups.dp.size())
    return Batch(prompts=prompts, mine=mine, pending=engine.submit([prompts[i] for i in mine], params))


def collect_and_grade(
    inputs: Inputs, groups: ParallelGroups, batch: Batch, progress: Progress | None = None
) -> list[Graded]:
    """Completions and rewards of all prompts, on every rank, in the order of the prompts.

    Each data-parallel rank grades its share. Ranks that share a model have the same completions; the first
    of them grades, so that a reward may be slow, random or a remote call. The others wait outside of
    collectives.
    """
    completions = batch.pending(progress)
    graded: list[Graded] = []
    if groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0:
        for i, texts in zip(batch.mine, completions, strict=True):
            rewards = tuple(grade(inputs, batch.prompts[i], completion) for completion in texts)
            graded.append((i, tuple(texts), rewards))
    groups.control.meet("responses and their grades")
    for group in (groups.tp, groups.cp, groups.pp):
        graded = share(graded, group=group)
    return sorted(gather_lists(graded, group=groups.dp), key=lambda row: row[0])


def grade(inputs: Inputs, prompt: Prompt, completion: Completion) -> float:
    """The reward of one completion; the stop token is not part of its text."""
    ids = completion.token_ids
    if completion.finish_reason == "stop":
        ids = ids[:-1]
    text = inputs.tokenizer.decode(ids, skip_special_tokens=False)
    return float(inputs.reward(prompt, completion, text))


def make_samples(inputs: Inputs, prompts: Sequence[Prompt], graded: Sequence[Graded]) -> list[Sample]:
    """Samples with advantages, prompt by prompt."""
    rewards = torch.tensor([row for _, _, row in graded], dtype=torch.float64)
    if inputs.config.loss.advantage == "leave_one_out":
        advantages = leave_one_out_advantages(rewards)
    else:
        advantages = group_normalized_advantages(rewards)
    return [
        Sample(prompt=prompt, number=number, completion=completion, reward=reward, advantage=advantage)
        for prompt, (_, completions, row), values in zip(prompts, graded, advantages.tolist(), strict=True)
        for number, (completion, reward, advantage) in enumerate(zip(completions, row, values, strict=True))
    ]


def sampling_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, advantages and lengths of one rollout."""
    columns = {
        "critic/score": [s.reward for s in samples],
        "critic/rewards": [s.reward for s in samples],
        "critic/advantages": [s.advantage for s in samples],
        "response_length": [float(len(s.completion.token_ids)) for s in samples],
        "prompt_length": [float(len(s.prompt.token_ids)) for s in samples],
    }
    metrics = {}
    for name, values in columns.items():
        metrics[f"{name}/mean"] = sum(values) / len(values)
        metrics[f"{name}/max"] = max(values)
        metrics[f"{name}/min"] = min(values)
    cut = sum(s.completion.finish_reason == "length" for s in samples)
    metrics["response_length/clip_ratio"] = cut / len(samples)
    return metrics
