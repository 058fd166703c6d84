"""The next prompts, the responses of the policy, and their grades, over all ranks.

The batch of step k is trained on weights k. With ``rollout.max_staleness`` = K the batches up to k + K are
asked for before step k trains, and sampled meanwhile: no token is from weights older than K versions when it
is learned from. K = 0 is the synchronous algorithm. Further prompts of step k are asked for at its turn, and
sampled by weights k.

Batches are made of prompts in their order and waited for to the last response. To train on whoever is done
first would favour short responses. Tokens stay on the rank that has them; all ranks learn the lengths,
rewards and versions.
"""

from __future__ import annotations

import faulthandler
import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config, sections
from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.objective import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.parallel.control import SLICE, Control
from megatron_fspo.parallel.groups import ParallelGroups, of_first_rank
from megatron_fspo.rewards import Failure, Grade, Grader, PendingGrade
from megatron_fspo.rollout.engine import Pending, Progress, RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import (
    COLUMNS,
    GRADES,
    Rollout,
    describe,
    rollout_of,
    routing_of,
    with_advantages,
)
from megatron_fspo.types import Completion, Prompt, SamplingParams

FAILED_REWARD = "reward_error.json"
"""The file with the response for which the reward failed."""
_SLACK_SECONDS = 60.0
"""Beyond ``parallel.wait_seconds``, for the main thread of a rank whose reward computes without end."""
_STOP_SECONDS = 3.0
"""For grades that are still missing when the job is asked to stop in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Responses that were asked for."""

    prompts: Sequence[Prompt]
    """The prompts of all ranks."""
    samples: int
    """Responses to each."""
    mine: range
    """Positions of this data-parallel rank's prompts."""
    pending: Pending
    grades: Mapping[int, PendingGrade]
    """Grades to come of the responses that this rank grades, by number: all once ``pending`` has returned."""


def make_grader(config: Config, groups: ParallelGroups) -> Grader | None:
    """The grader of a rank that hears of responses at first hand: the first one of the job, which talks to
    the servers, or the first one of each model copy. None on the others, so that a reward may be slow,
    random or a remote call."""
    servers = config.rollout.engine == "vllm"
    if not (dist.get_rank() == 0 if servers else groups.first_of_copy):
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
    grades: dict[int, PendingGrade] = {}

    def grade(number: int, completion: Completion) -> None:
        assert grader is not None
        text = response_text(inputs, completion)
        grades[number] = grader.submit(prompts[number // params.n], completion, text)

    pending = engine.submit(prompts, params, mine, grade if grader is not None else None)
    return Batch(prompts=prompts, samples=params.n, mine=mine, pending=pending, grades=grades)


def sampling_params(
    inputs: Inputs, options: sections.Rollout | sections.Evaluation, samples: int, seed: int
) -> SamplingParams:
    """What an engine is asked for per prompt, with temperature and top-p of a section."""
    rollout, environment = inputs.config.rollout, inputs.config.environment
    return SamplingParams(
        n=samples,
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=inputs.stop_token_ids,
        stop=rollout.stop,
        decode=inputs.decode,
        environment=inputs.environment,
        turns=environment.turns,
        turn_tokens=environment.turn_tokens,
        context_tokens=environment.context_tokens,
        seed=seed,
    )


class RolloutQueue:
    """Batches that were asked for and are still to be learned from; ``step`` is the first to ask for."""

    def __init__(
        self,
        inputs: Inputs,
        engine: RolloutEngine,
        groups: ParallelGroups,
        grader: Grader | None,
        prompts: PromptCursor,
        step: int,
    ) -> None:
        self._inputs = inputs
        self._of_engine = partial(ask, inputs, engine, groups, grader)
        self.prompts = prompts
        """Their state resumes a run: what was only asked for is asked for again."""
        self._next = step
        self._asked: deque[Batch] = deque()

    def take(self, step: int) -> Batch:
        """The batch of this step. Collective."""
        self.ask(step, ahead=0)
        self.prompts.close()
        return self._asked.popleft()

    def further(self, step: int, number: int, prompts: int) -> Batch:
        """Ask for so many prompts more, in a further round of the step under way: number 1 comes after the
        batch itself. Collective."""
        return self._ask(self.prompts.further(prompts), step, number)

    def ask(self, step: int, *, ahead: int | None = None) -> None:
        """Ask for the batch of this step, and for so many more as may be sampled while it trains: by default
        ``rollout.max_staleness``. Collective."""
        config = self._inputs.config
        ahead = config.rollout.max_staleness if ahead is None else ahead
        while self._next <= min(step + ahead, config.run.steps - 1):
            self._asked.append(self._ask(self.prompts.batch(), self._next))
            self._next += 1

    def _ask(self, indices: Sequence[int], step: int, number: int = 0) -> Batch:
        prompts, config = [self._inputs.train[i] for i in indices], self._inputs.config
        # A prompt that comes again in a later step, or in a later round, gets other responses.
        seed = config.run.seed * 1_000_000_007 + step + (number << 64)
        params = sampling_params(self._inputs, config.rollout, config.rollout.samples, seed)
        routing = routing_of(config, self._inputs.arch)
        return self._of_engine(prompts, replace(params, routing=routing))


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

    ``progress`` is called with the number of responses that have just finished. A request to stop the job
    ends the wait at once if it ``stops``; else it leaves grades 3 s more.

    Raises:
        StopRequested: it did, on every rank.
        RewardError: the reward failed for a response, or took longer than ``parallel.wait_seconds``, on
            whichever rank; on every rank.
    """
    completions = batch.pending(progress, stops=stops)
    held: dict[int, Completion] = {}
    if groups.first_of_copy:
        for position, row in zip(batch.mine, completions, strict=True):
            held |= dict(enumerate(row, start=position * batch.samples))
    grades, failures = _awaited(batch.grades, groups.control, progress, stops=stops)
    table = torch.zeros(len(batch.prompts) * batch.samples, len(COLUMNS), dtype=torch.float64)
    for number, completion in held.items():
        table[number, :-GRADES] = torch.tensor(describe(completion, groups.dp.rank()), dtype=torch.float64)
    for number, graded in grades.items():
        table[number, -GRADES:] = torch.tensor([graded.reward, graded.score], dtype=torch.float64)
    table[list(failures), -GRADES:] = math.nan
    # A rank may still sample, and then wait for its grades: who is late there says for which prompt.
    groups.control.meet(
        "responses and their grades", seconds=2 * groups.control.patience.wait + _SLACK_SECONDS
    )
    table = summed_over_all(table, inputs.backend.device)
    if table.isnan().any():  # on every rank
        raise_first(inputs.config, failures, batch.samples)
    return rollout_of(batch.prompts, batch.samples, table, held, grades)


def _awaited(
    pending: Mapping[int, PendingGrade], control: Control, progress: Progress | None, *, stops: bool
) -> tuple[dict[int, Grade], dict[int, Failure | None]]:
    """The grades up to the first failure, and that; None for one that a request to stop left open."""
    grades: dict[int, Grade] = {}
    limit = control.patience.wait
    # Two slices more, so that :func:`_watch` comes first: a call that it interrupts says where it was.
    too_late, stop_by = time.monotonic() + limit + 2 * SLICE, math.inf
    problem = f"gave no grade in {limit:g} s (parallel.wait_seconds)"
    # Without a limit of its own: if this rank raised alone, there would be no checkpoint.
    with control.waiting("grades", seconds=math.inf) as waiting:
        for number, grade in sorted(pending.items()):
            while not wait([grade], timeout=SLICE).done:
                waiting.check()
                now = time.monotonic()
                if control.stop_requested:
                    stop_by = min(stop_by, now + (0 if stops else _STOP_SECONDS))
                if now >= stop_by:
                    return grades, {number: None}
                if failed := [
                    n for n, one in pending.items() if one.done() and isinstance(one.result(), Failure)
                ]:
                    number = min(failed)
                    break
                if now > too_late:
                    return grades, {number: grade.missing(problem)}
            graded = pending[number].result()
            if isinstance(graded, Failure):
                if graded.interrupted:
                    graded = replace(graded, problem=f"{problem} and {graded.problem}")
                    return grades, {number: None if control.stop_requested else graded}
                return grades, {number: graded}
            grades[number] = graded
            if progress is not None:
                progress(0)  # it came further, for `status`
    return grades, {}


def summed_over_all(table: Tensor, device: torch.device) -> Tensor:
    """Each value is one rank's, and 0 on the others: so this gives every value to every rank, unchanged."""
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


def add_advantages(inputs: Inputs, groups: ParallelGroups, rollout: Rollout) -> Rollout:
    """The rollout with its advantages: the first rank's, as a zero decides who is in a pack. Collective."""
    by_group = (rollout.rewards.view(-1, rollout.samples), rollout.truncated.view(-1, rollout.samples))
    advantages = advantages_of(inputs.config, *by_group).to(inputs.backend.device)
    return with_advantages(rollout, of_first_rank(advantages, groups.dp_cp, groups.tp, groups.pp).cpu())


def advantages_of(config: Config, rewards: Tensor, truncated: Tensor) -> Tensor:
    """[prompts, samples] advantages, with what ``reward.truncated`` says of responses that were cut off.

    With ``drop`` a group is what is left of it: the mean is theirs, and a response that is left alone has
    nothing to be compared with. ``rewards`` are [prompts, samples], ``truncated`` of the same shape and bool.
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


def response_text(inputs: Inputs, completion: Completion) -> str:
    """Return the text that a reward reads: the last turn, without a stop token, with a stop string."""
    ids = list(completion.token_ids[completion.written[-1].start :])
    if ids and ids[-1] in inputs.stop_token_ids:
        ids = ids[:-1]
    return inputs.decode(ids)


def raise_first(config: Config, failures: Mapping[int, Failure | None], samples: int) -> NoReturn:
    """End all ranks with the first failure of any; the first rank writes its response to a file. Collective.

    ``failures`` are this rank's, by number of the response in the batch; some rank has one. None: there was
    no grade yet when the job was asked to stop.

    Raises:
        RewardError: one line, the same on every rank.
        StopRequested: on every rank; no reward failed.
    """
    every: list[dict[int, Failure | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, dict(failures))
    failed = {number: one for some in every for number, one in some.items() if one is not None}
    if not failed:
        raise StopRequested("a stop was requested during the wait for grades")
    number, failure = min(failed.items())
    # ``evaluate`` makes no folder, and one made here would be taken for a run.
    run = config.run_folder
    path = run / FAILED_REWARD if run.is_dir() else run.with_name(f"{run.name}.{FAILED_REWARD}")
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        evidence = {"reward": config.reward.name, "sample": number % samples, **failure.evidence()}
        path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    raise RewardError(
        f"reward {config.reward.name!r} {failure.problem} on prompt {failure.prompt.index}, "
        f"response {number % samples} (written to {path})"
    )
