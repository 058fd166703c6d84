"""Responses with their verdicts: what the policy writes, scored by the reward, over all ranks.

Tokens stay on the rank that has them; all ranks learn the lengths, rewards and versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.parallel.agree import of_first_rank
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rewards import Failure, judge
from megatron_fspo.rollout.engine import Pending, Progress, RolloutEngine
from megatron_fspo.trainer.failed_reward import raise_first
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import COLUMNS, Rollout, describe, rollout_of, with_advantages
from megatron_fspo.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Responses that were asked for."""

    prompts: Sequence[Prompt]
    """Of all ranks."""
    samples: int
    """Responses to each."""
    mine: range
    """Positions of this data-parallel rank's prompts."""
    pending: Pending


def ask(
    engine: RolloutEngine, groups: ParallelGroups, prompts: Sequence[Prompt], params: SamplingParams
) -> Batch:
    """Ask for responses to all prompts; each data-parallel rank for its share. Collective."""
    mine = range(groups.dp.rank(), len(prompts), groups.dp.size())
    pending = engine.submit(prompts, params, mine)
    return Batch(prompts=prompts, samples=params.n, mine=mine, pending=pending)


def is_first_of_copy(groups: ParallelGroups) -> bool:
    """Whether this is the rank of its model copy that holds responses and grades them."""
    return groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0


def collect_and_grade(
    inputs: Inputs,
    groups: ParallelGroups,
    batch: Batch,
    progress: Progress | None = None,
    *,
    stops: bool = False,
) -> Rollout:
    """Wait for the responses of a batch and grade them. Collective.

    Each data-parallel rank grades its share. Ranks that share a model have the same completions; the first
    of them grades, so that a reward may be slow, random or a remote call. The others wait outside of
    collectives.

    Args:
        stops: whether a request to stop the job may end the wait.

    Raises:
        StopRequested: it did, on every rank.
        RewardError: the reward failed for a response, on whichever rank; on every rank.
    """
    completions = batch.pending(progress, stops=stops)
    held: dict[int, Completion] = {}
    failures: dict[int, Failure] = {}
    table = torch.zeros(len(batch.prompts) * batch.samples, len(COLUMNS), dtype=torch.float64)
    if is_first_of_copy(groups):
        for position, row in zip(batch.mine, completions, strict=True):
            first = position * batch.samples
            held |= dict(enumerate(row, start=first))
            verdicts = [grade(inputs, batch.prompts[position], completion) for completion in row]
            failures |= {n: v for n, v in enumerate(verdicts, start=first) if isinstance(v, Failure)}
            described = [
                describe(completion, math.nan if isinstance(verdict, Failure) else verdict, groups.dp.rank())
                for completion, verdict in zip(row, verdicts, strict=True)
            ]
            table[first : first + len(row)] = torch.tensor(described, dtype=torch.float64)
            if failures:
                break
    groups.control.meet("responses and their grades")
    table = _summed_over_all(table, inputs.backend.device)
    if table.isnan().any():  # a failure's reward, on every rank
        raise_first(inputs.config, failures, batch.samples)
    return rollout_of(batch.prompts, batch.samples, table, held)


def _summed_over_all(table: Tensor, device: torch.device) -> Tensor:
    """Each row is one rank's, and 0 on the others: so this gives every row to every rank, unchanged."""
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


def grade(inputs: Inputs, prompt: Prompt, completion: Completion) -> float | Failure:
    """The reward of one completion."""
    return judge(inputs.reward, prompt, completion, response_text(inputs, completion))


def response_text(inputs: Inputs, completion: Completion) -> str:
    """What a reward is given to read; the stop token is not part of it."""
    ids = list(completion.token_ids)
    if completion.finish_reason == "stop":
        ids = ids[:-1]
    text: str = inputs.tokenizer.decode(ids, skip_special_tokens=False)
    return text


def add_advantages(inputs: Inputs, groups: ParallelGroups, rollout: Rollout) -> Rollout:
    """The rollout with its advantages: the first rank's, as a zero decides who is in a pack. Collective."""
    rewards = rollout.rewards.view(-1, rollout.samples)
    if inputs.config.loss.advantage == "leave_one_out":
        advantages = leave_one_out_advantages(rewards)
    else:
        advantages = group_normalized_advantages(rewards)
    advantages = advantages.to(inputs.backend.device)
    return with_advantages(rollout, of_first_rank(advantages, groups.dp_cp, groups.tp, groups.pp).cpu())


def sampling_metrics(rollout: Rollout) -> dict[str, float]:
    """Rewards, advantages and lengths of one rollout: of all responses, in a pack or not.

    ``critic/no_spread`` is the share of groups whose advantages are all 0.
    """
    columns = {
        "critic/score": rollout.rewards,
        "critic/rewards": rollout.rewards,
        "critic/advantages": rollout.advantages,
        "response_length": rollout.lengths.double(),
        "prompt_length": rollout.prompt_lengths.double(),
    }
    metrics = {}
    for name, values in columns.items():
        metrics[f"{name}/mean"] = values.mean().item()
        metrics[f"{name}/max"] = values.max().item()
        metrics[f"{name}/min"] = values.min().item()
    metrics["response_length/clip_ratio"] = rollout.truncated.double().mean().item()
    metrics["critic/no_spread"] = (~rollout.spread).double().mean().item()
    return metrics
