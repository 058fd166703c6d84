"""Requests responses to the next prompts, and collects them with their grades, over all ranks.

Step k starts from weights of version k. With ``rollout.max_staleness`` = K, batches up to step k + K are
requested before step k trains, and sampled meanwhile, so a step trains on tokens at most K versions old.
K = 0 is the synchronous algorithm. Further prompts of step k are requested in step k.

Batches consist of consecutive prompts, and a step waits for all their responses: training on the first that
finish would favour short ones. Tokens stay on the ranks that receive them; all ranks get lengths, rewards and
versions.
"""

from __future__ import annotations

import json
import math
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
from megatron_fspo.parallel.control import SLICE, Control
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rewards import Failure, Grade, Grader, PendingGrade
from megatron_fspo.rollout.engine import Pending, Progress, RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import COLUMNS, GRADES, Rollout, describe, make_rollout, make_routing
from megatron_fspo.types import Completion, Prompt, SamplingParams

FAILED_REWARD = "reward_error.json"
"""Name of the file with the response for which a reward failed."""
_SLACK_SECONDS = 60.0
"""Time for the error of a rank that has waited for grades for too long to reach the others."""
_STOP_SECONDS = 3.0
"""Time for missing grades of an evaluation after a stop was requested."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Responses that were requested."""

    prompts: Sequence[Prompt]
    """The prompts of all ranks."""
    samples: int
    """Responses per prompt."""
    mine: range
    """Positions of this data-parallel rank's prompts."""
    pending: Pending
    grades: Mapping[int, PendingGrade]
    """Response number → pending grade, for responses that this rank grades; complete when ``pending`` has
    returned."""


def make_grader(config: Config, groups: ParallelGroups) -> Grader | None:
    """Return the grader of a rank that receives responses from the sampler: the first rank of the job with
    vLLM servers, otherwise the first rank of each replica. None on other ranks, so that each response is
    graded once, by rewards that may be slow, random or remote; and without rollouts."""
    if config.supervised:
        return None
    servers = config.rollout.engine == "vllm"
    if not (dist.get_rank() == 0 if servers else groups.is_replica_leader):
        return None
    return Grader(config.reward, max_response_tokens=config.rollout.max_response_tokens)


def ask(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    grader: Grader | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> Request:
    """Request responses to all prompts, of which each data-parallel rank receives its share. Each response is
    graded when it arrives, while others are sampled and the trainer trains. Collective."""
    mine = range(groups.dp.rank(), len(prompts), groups.dp.size())
    grades: dict[int, PendingGrade] = {}

    def grade(number: int, completion: Completion) -> None:
        assert grader is not None
        text = response_text(inputs, completion)
        grades[number] = grader.submit(prompts[number // params.n], completion, text)

    pending = engine.submit(prompts, params, mine, grade if grader is not None else None)
    return Request(prompts=prompts, samples=params.n, mine=mine, pending=pending, grades=grades)


def sampling_params(
    inputs: Inputs, options: sections.Rollout | sections.Evaluation, samples: int, seed: int
) -> SamplingParams:
    """Return the sampling parameters, with temperature and top-p from the section ``options``."""
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
    """Batches that were requested but not yet taken for training; ``step`` is the first one to request."""

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
        """The prompt cursor. A run that resumes from its state requests open batches again."""
        self._next = step
        self._asked: deque[Request] = deque()

    def take(self, step: int) -> Request:
        """Return the batch of this step. Collective."""
        self.ask(step, ahead=0)
        self.prompts.close()
        return self._asked.popleft()

    def further(self, step: int, number: int, prompts: int) -> Request:
        """Request responses to ``prompts`` further prompts, in round ``number`` of the current step, counted
        from 1. Collective."""
        return self._ask(self.prompts.further(prompts), step, number)

    def ask(self, step: int, *, ahead: int | None = None) -> None:
        """Request the batches of this step and of the ``ahead`` steps after it (default:
        ``rollout.max_staleness``), unless already requested. Collective."""
        config = self._inputs.config
        ahead = config.rollout.max_staleness if ahead is None else ahead
        while self._next <= min(step + ahead, config.run.steps - 1):
            self._asked.append(self._ask(self.prompts.batch(), self._next))
            self._next += 1

    def _ask(self, indices: Sequence[int], step: int, number: int = 0) -> Request:
        prompts, config = [self._inputs.train[i] for i in indices], self._inputs.config
        # Other seeds, and so other responses, if a prompt is repeated in a later step or round.
        seed = config.run.seed * 1_000_000_007 + step + (number << 64)
        params = sampling_params(self._inputs, config.rollout, config.samples, seed)
        routing = make_routing(config, self._inputs.arch)
        return self._of_engine(prompts, replace(params, routing=routing))


def collect_and_grade(
    inputs: Inputs,
    groups: ParallelGroups,
    request: Request,
    progress: Progress | None = None,
    *,
    stops: bool = False,
) -> Rollout:
    """Wait for the responses of a request and their grades; ranks wait outside of collectives. Collective.

    ``progress`` is called with the number of newly finished responses. If a stop is requested, the wait ends
    at once with ``stops``; otherwise grades have 3 s more.

    Raises:
        StopRequested: on every rank, if a stop request ended the wait.
        RewardError: on every rank, if a reward failed or took longer than ``parallel.wait_seconds`` on any.
    """
    completions = request.pending(progress, stops=stops)
    held: dict[int, Completion] = {}
    if groups.is_replica_leader:
        for position, row in zip(request.mine, completions, strict=True):
            held |= dict(enumerate(row, start=position * request.samples))
    grades, failures = _awaited(request.grades, groups.control, progress, stops=stops)
    table = torch.zeros(len(request.prompts) * request.samples, len(COLUMNS), dtype=torch.float64)
    for number, completion in held.items():
        table[number] = torch.tensor(describe(completion, groups.dp.rank()), dtype=torch.float64)
    for number, graded in grades.items():
        table[number, GRADES] = torch.tensor([graded.reward, graded.score], dtype=torch.float64)
    for number in failures:
        table[number, GRADES] = math.nan
    # Long enough for a rank to sample and then to wait for grades, whose time-out error names the prompt.
    groups.control.barrier(
        "responses and their grades", seconds=2 * groups.control.timeouts.wait + _SLACK_SECONDS
    )
    table = summed_over_all(table, inputs.backend.device)
    if table.isnan().any():  # on every rank
        raise_first(inputs.config, failures, request.samples)
    return make_rollout(request.prompts, request.samples, table, held, grades)


def _awaited(
    pending: Mapping[int, PendingGrade], control: Control, progress: Progress | None, *, stops: bool
) -> tuple[dict[int, Grade], dict[int, Failure | None]]:
    """Wait for the grades; return those before the first failure, and number → failure. The failure is None
    if a stop request ended the wait."""
    grades: dict[int, Grade] = {}
    limit = control.timeouts.wait
    too_late, stop_by = time.monotonic() + limit, math.inf
    # Without a time limit: if this rank raised alone, no checkpoint could be saved.
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
                    n for n, grade in pending.items() if grade.done() and isinstance(grade.result(), Failure)
                ]:
                    number = min(failed)
                    break
                if now > too_late:
                    # The call that was submitted first does not wait for its turn.
                    late = [n for n, grade in pending.items() if not grade.done()] or [number]
                    lines = f"; calls stand at {', '.join(at[:3])}" if (at := grade.standing()) else ""
                    problem = f"gave no grade in {limit:g} s (parallel.wait_seconds){lines}"
                    return grades, {late[0]: pending[late[0]].missing(problem)}
            graded = pending[number].result()
            if isinstance(graded, Failure):
                return grades, {number: graded}
            grades[number] = graded
            if progress is not None:
                progress(0)  # marks progress for `status`
    return grades, {}


def summed_over_all(table: Tensor, device: torch.device) -> Tensor:
    """Sum over all ranks. Each value is 0 on all ranks but one, so this copies it to all. Collective."""
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


def response_text(inputs: Inputs, completion: Completion) -> str:
    """Return the text for the reward: the last turn, without its stop token but with a stop string."""
    ids = list(completion.token_ids[completion.turns[-1].start :])
    if ids and ids[-1] in inputs.stop_token_ids:
        ids = ids[:-1]
    return inputs.decode(ids)


def raise_first(config: Config, failures: Mapping[int, Failure | None], samples: int) -> NoReturn:
    """Raise the first failure of all ranks as ``RewardError`` on every rank; the first rank writes its
    response to a file. Raises ``StopRequested`` if no reward failed. Collective.

    ``failures`` are this rank's, by number of the response in the batch; None if a stop was requested before
    there was a grade. At least one rank must have an entry.
    """
    every: list[dict[int, Failure | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, dict(failures))
    failed = {number: error for errors in every for number, error in errors.items() if error is not None}
    if not failed:
        raise StopRequested("a stop was requested during the wait for grades")
    number, failure = min(failed.items())
    # `evaluate` has no run folder, and must not create one, which would look like a run.
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
