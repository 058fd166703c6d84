"""Responses with their verdicts: what the policy writes, scored by the reward, over all ranks.

Tokens stay on the rank that has them; all ranks learn the lengths, rewards and versions.
"""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.parallel.control import SLICE, Control
from megatron_fspo.parallel.groups import ParallelGroups, of_first_rank
from megatron_fspo.parallel.metrics import Totals, means
from megatron_fspo.rewards import Failure, Grade, Grader, PendingGrade, tally
from megatron_fspo.rollout.engine import Pending, Progress, RolloutEngine
from megatron_fspo.trainer.failed_reward import raise_first
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import COLUMNS, GRADES, Rollout, describe, rollout_of, with_advantages
from megatron_fspo.types import Completion, Prompt, SamplingParams

_SLACK_SECONDS = 60.0
"""Beyond ``parallel.wait_seconds``, for the main thread of a rank whose reward computes without end."""
_STOP_SECONDS = 3.0
"""For grades that are still missing when the job is asked to stop in an evaluation."""


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
    verdicts: Mapping[int, PendingGrade]
    """Of the responses that this rank grades, by number: all of them once ``pending`` has returned."""


def make_grader(config: Config, groups: ParallelGroups) -> Grader | None:
    """The grader of a rank that hears of responses at first hand: the first one of the job, which talks to
    the servers, or the first one of each model copy. None on the others, so that a reward may be slow,
    random or a remote call."""
    servers = config.rollout.engine == "vllm"
    if not (dist.get_rank() == 0 if servers else is_first_of_copy(groups)):
        return None
    grader = Grader(config.reward, max_response_tokens=config.rollout.max_response_tokens)
    threading.Thread(target=_watch, args=(grader, groups.control), name="grades", daemon=True).start()
    return grader


def _watch(grader: Grader, control: Control) -> None:
    """End calls that last too long, beside the main thread: one that computes leaves that few turns. One that
    keeps Python's lock to itself ends the process, which prints what its threads were at."""
    limit = control.patience.wait
    while not grader.closed.wait(SLICE):
        grader.interrupt(1.0 if control.stop_requested else limit)
        faulthandler.dump_traceback_later(limit + _SLACK_SECONDS, exit=True, file=2)
    faulthandler.cancel_dump_traceback_later()


def ask(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    grader: Grader | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> Batch:
    """Ask for responses to all prompts; each data-parallel rank for its share. Each is graded as soon as it
    is there, while others are sampled and the trainer learns. Collective."""
    mine = range(groups.dp.rank(), len(prompts), groups.dp.size())
    verdicts: dict[int, PendingGrade] = {}

    def grade(number: int, completion: Completion) -> None:
        assert grader is not None
        text = response_text(inputs, completion)
        verdicts[number] = grader.submit(prompts[number // params.n], completion, text)

    pending = engine.submit(prompts, params, mine, grade if grader is not None else None)
    return Batch(prompts=prompts, samples=params.n, mine=mine, pending=pending, verdicts=verdicts)


def is_first_of_copy(groups: ParallelGroups) -> bool:
    """Whether this is the rank of its model copy that holds responses."""
    return groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0


def collect_and_grade(
    inputs: Inputs,
    groups: ParallelGroups,
    batch: Batch,
    progress: Progress | None = None,
    *,
    stops: bool = False,
) -> Rollout:
    """Wait for the responses of a batch and for their grades. Collective; ranks that have neither to wait for
    wait for the others outside of collectives.

    Args:
        stops: whether a request to stop the job ends the wait at once. If not, it leaves grades 3 s more.

    Raises:
        StopRequested: it did, on every rank.
        RewardError: the reward failed for a response, or took longer than ``parallel.wait_seconds``, on
            whichever rank; on every rank.
    """
    completions = batch.pending(progress, stops=stops)
    held: dict[int, Completion] = {}
    if is_first_of_copy(groups):
        for position, row in zip(batch.mine, completions, strict=True):
            held |= dict(enumerate(row, start=position * batch.samples))
    verdicts, failures = _awaited(batch.verdicts, groups.control, progress, stops=stops)
    table = torch.zeros(len(batch.prompts) * batch.samples, len(COLUMNS), dtype=torch.float64)
    for number, completion in held.items():
        table[number, :-GRADES] = torch.tensor(describe(completion, groups.dp.rank()), dtype=torch.float64)
    for number, graded in verdicts.items():
        table[number, -GRADES:] = torch.tensor([graded.reward, graded.score], dtype=torch.float64)
    table[list(failures), -GRADES:] = math.nan
    # A rank may still sample, and then wait for its grades: who is late there says for which prompt.
    groups.control.meet(
        "responses and their grades", seconds=2 * groups.control.patience.wait + _SLACK_SECONDS
    )
    table = _summed_over_all(table, inputs.backend.device)
    if table.isnan().any():  # on every rank
        raise_first(inputs.config, failures, batch.samples)
    return rollout_of(batch.prompts, batch.samples, table, held, verdicts)


def _awaited(
    pending: Mapping[int, PendingGrade], control: Control, progress: Progress | None, *, stops: bool
) -> tuple[dict[int, Grade], dict[int, Failure | None]]:
    """The verdicts up to the first failure, and that; None for one that a request to stop left open."""
    verdicts: dict[int, Grade] = {}
    limit = control.patience.wait
    # Two slices more, so that :func:`_watch` comes first: a call that it interrupts says where it was.
    too_late, stop_by = time.monotonic() + limit + 2 * SLICE, math.inf
    problem = f"gave no verdict in {limit:g} s (parallel.wait_seconds)"
    # Without a limit of its own: if this rank raised alone, there would be no checkpoint.
    with control.waiting("grades", seconds=math.inf) as waiting:
        for number, verdict in sorted(pending.items()):
            while not wait([verdict], timeout=SLICE).done:
                waiting.check()
                now = time.monotonic()
                if control.stop_requested:
                    stop_by = min(stop_by, now + (0 if stops else _STOP_SECONDS))
                if now >= stop_by:
                    return verdicts, {number: None}
                if failed := [n for n, one in pending.items() if one.done() and _failed(one)]:
                    number = min(failed)
                    break
                if now > too_late:
                    return verdicts, {number: verdict.missing(problem)}
            graded = pending[number].result()
            if isinstance(graded, Failure):
                if graded.interrupted:
                    graded = replace(graded, problem=f"{problem} and {graded.problem}")
                    return verdicts, {number: None if control.stop_requested else graded}
                return verdicts, {number: graded}
            verdicts[number] = graded
            if progress is not None:
                progress(0)  # it came further, for `status`
    return verdicts, {}


def _failed(verdict: PendingGrade) -> bool:
    return isinstance(verdict.result(), Failure)


def _summed_over_all(table: Tensor, device: torch.device) -> Tensor:
    """Each value is one rank's, and 0 on the others: so this gives every value to every rank, unchanged."""
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


def response_text(inputs: Inputs, completion: Completion) -> str:
    """What a reward is given to read. A stop token is not part of it, a stop string is."""
    ids = list(completion.token_ids)
    if ids and ids[-1] in inputs.stop_token_ids:
        ids = ids[:-1]
    return inputs.decode(ids)


def add_advantages(inputs: Inputs, groups: ParallelGroups, rollout: Rollout) -> Rollout:
    """The rollout with its advantages: the first rank's, as a zero decides who is in a pack. Collective."""
    by_group = (rollout.rewards.view(-1, rollout.samples), rollout.truncated.view(-1, rollout.samples))
    advantages = advantages_of(inputs.config, *by_group).to(inputs.backend.device)
    return with_advantages(rollout, of_first_rank(advantages, groups.dp_cp, groups.tp, groups.pp).cpu())


def advantages_of(config: Config, rewards: Tensor, truncated: Tensor) -> Tensor:
    """[prompts, samples] advantages, with what ``reward.truncated`` says of responses that were cut off.

    With ``drop`` a group is what is left of it: the mean is theirs, and a response that is left alone has
    nothing to be compared with.

    Args:
        rewards: [prompts, samples].
        truncated: [prompts, samples] bool.
    """
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


def reward_metrics(inputs: Inputs, rollout: Rollout) -> dict[str, float]:
    """``reward/…``: how the verdicts came about, over the responses of all ranks. Collective."""
    totals = tally(inputs.config.reward, rollout.verdicts.values())
    if not totals:
        return {}
    table = torch.tensor(list(totals.values()), dtype=torch.float64)
    summed = _summed_over_all(table, inputs.backend.device).tolist()
    together: Totals = {name: (total, count) for name, (total, count) in zip(totals, summed, strict=True)}
    return means(together)


def sampling_metrics(rollout: Rollout) -> dict[str, float]:
    """Rewards, advantages and lengths of one rollout: of all responses, in a pack or not.

    ``critic/no_spread`` is the share of groups whose advantages are all 0.
    """
    columns = {
        "critic/score": rollout.scores,
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
