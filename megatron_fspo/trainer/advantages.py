"""From rewards to advantages; metrics of the rewards, and what to say if no response has an advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.errors import RewardError
from megatron_fspo.job.resume import newest_checkpoint
from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.parallel.groups import ParallelGroups, agreed, broadcast_first, means
from megatron_fspo.record.log import RunLog
from megatron_fspo.rewards import tally
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout, with_advantages
from megatron_fspo.trainer.sampling import Request, collect_and_grade, response_text, summed_over_all

MOST_ENDED = 0.05
"""Share of rewards that are 0 because their grader worker ended, above which the run warns."""
_SHOWN = 3
"""Number of responses in the message about a zero-variance step."""
_CHARACTERS = 80
"""Number of characters of a text in that message."""


def graded_responses(request: Request, inputs: Inputs, groups: ParallelGroups, log: RunLog) -> Rollout:
    """Wait for the responses of a request and their grades; return them with advantages. Collective."""
    total = len(request.prompts) * request.samples // groups.dp.size()
    with log.phase("gen", total, "response") as progress:
        graded = collect_and_grade(inputs, groups, request, progress, stops=True)
    return add_advantages(inputs, groups, graded)


def add_advantages(inputs: Inputs, groups: ParallelGroups, rollout: Rollout) -> Rollout:
    """Add the first rank's advantages, which must agree, as zeros decide what is packed. Collective."""
    by_group = (rollout.rewards.view(-1, rollout.samples), rollout.truncated.view(-1, rollout.samples))
    advantages = compute_advantages(inputs.config, *by_group).to(inputs.backend.device)
    return with_advantages(rollout, broadcast_first(advantages, groups.dp_cp, groups.tp, groups.pp).cpu())


def compute_advantages(config: Config, rewards: Tensor, truncated: Tensor) -> Tensor:
    """Return advantages [prompts, samples] from ``rewards`` and ``truncated`` (bool) of that shape. With
    ``reward.truncated = drop``, groups consist of the other responses; one that remains alone gets 0.
    Responses that the data gives have 1."""
    if config.supervised:
        return torch.ones_like(rewards)
    estimate = (
        leave_one_out_advantages if config.loss.advantage == "leave_one_out" else group_normalized_advantages
    )
    if config.reward.truncated == "keep":
        return estimate(rewards)
    if config.reward.truncated == "zero_advantage":
        return estimate(rewards).masked_fill(truncated, 0.0)
    advantages = torch.zeros_like(rewards)
    for row, whole in enumerate(~truncated):
        if int(whole.sum()) > 1:
            advantages[row, whole] = estimate(rewards[row : row + 1, whole])[0]
    return advantages


def reward_metrics(sampled: Rollout, inputs: Inputs, log: RunLog, step: int) -> dict[str, float]:
    """Return the metrics of the grades of all ranks; warn if many grader workers ended. Collective."""
    totals = tally(inputs.config.reward, sampled.grades.values())
    if not totals:
        return {}
    table = torch.tensor(list(totals.values()), dtype=torch.float64)
    summed = summed_over_all(table, inputs.backend.device).tolist()
    metrics = means({name: (total, count) for name, (total, count) in zip(totals, summed, strict=True)})
    if (ended := metrics.get("reward/timeout_rate", 0.0)) > MOST_ENDED:
        log.remind(
            "reward/timeout_rate",
            step,
            f"{ended:.1%} of the rewards are 0 because a grader worker hit its limits or died twice: check "
            "reward.seconds, reward.memory_gb and the machine's free memory",
        )
    return metrics


def check_variance(sampled: Rollout, inputs: Inputs, groups: ParallelGroups, log: RunLog, step: int) -> None:
    """Warn, with a few responses, if all advantages of the step are 0. Raises ``RewardError`` on every rank
    after ``reward.max_zero_variance_steps`` such steps in a row. Collective.

    The usual cause is the reward function: if it expects the bare answer but the policy explains it, all
    rewards are 0. ``sampled`` includes the responses that dynamic sampling dropped.
    """
    if sampled.has_variance.any() or inputs.config.teacher.in_use:  # which gives a gradient of its own
        return
    count = 1 + agreed(log.zero_variance_steps(), groups)
    options = inputs.config.reward
    lowest, highest = sampled.rewards.min().item(), sampled.rewards.max().item()
    if lowest == highest:
        what = f"all {len(sampled)} rewards are {lowest:g}"
    elif bool((sampled.rewards.view(-1, sampled.samples).diff(dim=1) == 0).all()):
        what = f"no two of a prompt's {sampled.samples} rewards differ (they are {lowest:g} to {highest:g})"
    else:
        cut = f"{int(sampled.truncated.sum())} of {len(sampled)} responses are cut"
        what = f"all advantages are 0: {cut}, and reward.truncated = {options.truncated}"
    lines = [f"step {step}: {what}: nothing to learn from (steps in a row: {count})"]
    # Responses that this rank holds, each to another prompt as far as possible.
    for number in sorted(sampled.held, key=lambda number: (number % sampled.samples, number))[:_SHOWN]:
        prompt = sampled.prompts[number // sampled.samples]
        text = response_text(inputs, sampled.held[number])
        lines.append(
            f"prompt {prompt.index} {_short(prompt.text)}: response {_short(text)}, "
            f"answer {_short(prompt.answer)}, reward {sampled.rewards[number]:g}"
        )
    log.warn("zero-variance rewards", "\n  ".join(lines))
    limit = options.max_zero_variance_steps
    if limit and count >= limit:
        good = newest_checkpoint(inputs.config, step=step - count)
        before = f"{good} is from before them: to continue from it, remove the newer ones" if good else ""
        raise RewardError(
            f"reward {options.name!r}: {what}, and {count} steps in a row had nothing to learn from "
            f"(reward.max_zero_variance_steps = {limit}; 0 disables this error). "
            f"{before or 'No checkpoint is from before them'}"
        )


def _short(text: str) -> str:
    """Shorten a text to its beginning and its end, which usually has the answer, on one line."""
    half = _CHARACTERS // 2
    return repr(text if len(text) <= _CHARACTERS else f"{text[:half]} … {text[-half:]}")
