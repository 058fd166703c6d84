"""The begin of a step: prompts → responses → rewards → advantages → packs → old log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.job.folder import newest_checkpoint
from megatron_fspo.mcore.lora import without_adapters
from megatron_fspo.mcore.nonfinite import suspects_of
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.router import RouterPasses
from megatron_fspo.packing.batch import Packs
from megatron_fspo.parallel.groups import agreed, means
from megatron_fspo.rewards import tally
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.correction import correct, little_is_left
from megatron_fspo.trainer.mismatch import FP8_LIMIT, LIMIT, MismatchAlarm, measure
from megatron_fspo.trainer.optimize import Step, drop_culprits, is_stopping
from megatron_fspo.trainer.rollout import (
    Rollout,
    join,
    make_mini_batches,
    routing_of,
    sampling_metrics,
    select,
    staleness_metrics,
)
from megatron_fspo.trainer.sampling import (
    Batch,
    add_advantages,
    collect_and_grade,
    response_text,
    summed_over_all,
)

MOST_ENDED = 0.05
"""Share of grades that are 0 for want of a worker that lived, above which the run says so."""
_SHOWN = 3
"""Responses in the message of a step without spread."""
_CHARACTERS = 80
"""Length of a text in that message."""


def begin_step(run: Training) -> Step:
    """Do all of a step up to its first optimizer step. Collective.

    Raises:
        StopRequested: the job was asked to stop before all this was done.
        RewardError: the rewards of the rollout are no use.
    """
    responses, metrics = roll_out(run)
    if is_stopping(run):
        raise StopRequested("a stop was requested during the rollout")
    run.engine.rest()
    step = with_packs(run, responses, metrics)
    if is_stopping(run):
        raise StopRequested("a stop was requested during the old pass")
    return step


def roll_out(run: Training) -> tuple[Rollout, dict[str, float]]:
    """Responses to the next prompts, graded, with advantages; those of later steps, as far ahead as may be,
    are asked for. Collective. The metrics are of all that were sampled, also where only some stay."""
    options = run.inputs.config.rollout
    run.groups.control.meet("the first rank to write its records")
    responses = sampled = _responses(run, run.queue.take(run.step))
    rounds: dict[str, float] = {}
    if options.dynamic_sampling:
        filled = fill(
            responses,
            lambda number, prompts: _responses(run, run.queue.further(run.step, number, prompts)),
            max_rounds=options.max_rounds,
        )
        responses, sampled, rounds = filled.batch, filled.sampled, filled.metrics()
        if filled.unfilled:
            run.log.say(
                f"step {run.step + 1}: {filled.unfilled} of {len(responses.prompts)} groups have no spread "
                f"after {filled.rounds} rounds with {len(sampled.prompts)} prompts (rollout.max_rounds)"
            )
    metrics = sampling_metrics(sampled, environment=run.inputs.environment is not None) | rounds
    totals = tally(run.inputs.config.reward, sampled.grades.values())
    if totals:
        table = torch.tensor(list(totals.values()), dtype=torch.float64)
        summed = summed_over_all(table, run.inputs.backend.device).tolist()
        metrics |= means({name: (total, count) for name, (total, count) in zip(totals, summed, strict=True)})
    if (ended := metrics.get("reward/timeout_rate", 0.0)) > MOST_ENDED:
        run.log.remind(
            "reward/timeout_rate",
            run.step + 1,
            f"{ended:.1%} of the rewards are 0 because a grader worker hit its limits or died twice: see "
            "reward.seconds, reward.memory_gb and whether the machine is short of memory",
        )
    check_spread(run, sampled)
    run.queue.ask(run.step)
    return responses, metrics


def _responses(run: Training, batch: Batch) -> Rollout:
    total = len(batch.prompts) * batch.samples // run.groups.dp.size()
    with run.log.phase("gen", total, "response", run.timings) as progress:
        graded = collect_and_grade(run.inputs, run.groups, batch, progress, stops=True)
    return add_advantages(run.inputs, run.groups, graded)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The batch of a step, and what it was chosen from by dynamic sampling (DAPO, arXiv 2503.14476).

    Groups whose rewards are all equal have no gradient. They are replaced by groups of further prompts,
    sampled in rounds by the present weights, until the batch is full or the rounds are used up. Groups are
    taken in the order of their prompts, and every round is waited for to its last response, so that speed
    decides nothing. Lengths of lists, and which advantages are 0, are the same on every rank: all agree.
    """

    batch: Rollout
    """As many groups as the first round had."""
    sampled: Rollout
    """All groups of all rounds."""
    rounds: int

    @property
    def unfilled(self) -> int:
        """Groups of the batch without spread."""
        return int((~self.batch.spread).sum())

    def metrics(self) -> dict[str, float]:
        """Under ``rollout/dynamic/``: ``rounds`` and ``prompts_sampled``, the first round included; of their
        groups ``groups_dropped`` for want of spread and ``groups_surplus``, with spread but too late;
        ``unfilled``, groups of the batch without spread; and rewards and lengths of the batch."""
        spread, kept = int(self.sampled.spread.sum()), int(self.batch.spread.sum())
        sampled = len(self.sampled.prompts)
        numbers = {
            "rounds": self.rounds,
            "prompts_sampled": sampled,
            "groups_dropped": sampled - spread - self.unfilled,
            "groups_surplus": spread - kept,
            "unfilled": self.unfilled,
            "batch_rewards/mean": self.batch.rewards.mean().item(),
            "batch_response_length/mean": self.batch.lengths.double().mean().item(),
        }
        return {f"rollout/dynamic/{name}": float(value) for name, value in numbers.items()}


def fill(first: Rollout, further: Callable[[int, int], Rollout], *, max_rounds: int) -> Filled:
    """Sample further prompts until as many groups as the first round has have a spread. Collective.

    Args:
        first: the first round.
        further: ``(number, prompts)`` → responses to so many further prompts, with their advantages. Numbers
            count from 1. Collective.
        max_rounds: at most, the first included. If they do not suffice, groups without spread stay in the
            batch: its size, and so N and the number of optimizer steps, is the same in every step.
    """
    size = len(first.prompts)
    rounds, full, sampled = [first], int(first.spread.sum()), size
    while full < size and len(rounds) < max_rounds:
        # As many as will give the missing ones, if spread is as frequent as so far.
        count = min(size, -(-(size - full) * sampled // full)) if full else size
        rounds.append(further(len(rounds), count))
        full += int(rounds[-1].spread.sum())
        sampled += count
    together = join(rounds)
    spread = together.spread.tolist()
    # The first ones with spread; if they are too few, also the first ones without: among the others, and not
    # in one mini-batch.
    chosen = sorted(range(sampled), key=lambda group: not spread[group])[:size]
    return Filled(batch=select(together, sorted(chosen)), sampled=together, rounds=len(rounds))


def check_spread(run: Training, sampled: Rollout) -> None:
    """Tell of a step in which no two responses to a prompt have different rewards, with a few responses.
    Collective.

    Most often the reward is to blame: one that wants the bare answer, of a policy that explains it, gives 0
    to everything, for days. ``sampled`` includes the responses that dynamic sampling left out.

    Raises:
        RewardError: it is one too many in a row (``reward.max_steps_without_spread``); on every rank.
    """
    if sampled.spread.any():
        return
    count = 1 + agreed(run.log.steps_without_spread(), run.groups)
    options = run.inputs.config.reward
    lowest, highest = sampled.rewards.min().item(), sampled.rewards.max().item()
    if lowest == highest:
        what = f"all {len(sampled)} rewards are {lowest:g}"
    else:
        what = f"no two of a prompt's {sampled.samples} rewards differ (they are {lowest:g} to {highest:g})"
    lines = [f"step {run.step + 1}: {what}: nothing to learn from (steps in a row: {count})"]
    # Of those that this rank holds, of as many prompts as there are.
    for number in sorted(sampled.held, key=lambda number: (number % sampled.samples, number))[:_SHOWN]:
        prompt = sampled.prompts[number // sampled.samples]
        text = response_text(run.inputs, sampled.held[number])
        lines.append(
            f"prompt {prompt.index} {_short(prompt.text)}: response {_short(text)}, "
            f"answer {_short(prompt.answer)}, reward {sampled.rewards[number]:g}"
        )
    run.log.warn("rewards without spread", "\n  ".join(lines))
    limit = options.max_steps_without_spread
    if limit and count >= limit:
        good = newest_checkpoint(run.inputs.config, step=run.step + 1 - count)
        before = f"{good} is from before them: to go on from it, remove those after it" if good else ""
        raise RewardError(
            f"reward {options.name!r}: {what}, and {count} steps in a row had nothing to learn from "
            f"(reward.max_steps_without_spread = {limit}; 0: never an error). "
            f"{before or 'No checkpoint is from before them'}"
        )


def _short(text: str) -> str:
    """A text on one line, with its beginning and its end, where an answer is."""
    half = _CHARACTERS // 2
    return repr(text if len(text) <= _CHARACTERS else f"{text[:half]} … {text[-half:]}")


def with_packs(run: Training, responses: Rollout, metrics: dict[str, float]) -> Step:
    """Return the step on these responses. Collective.

    Its packs have the log-probs that S starts from, unless these equal the new ones; the weights of a
    correction; and for a KL penalty the log-probs of the reference policy.
    """
    config = run.inputs.config
    metrics |= staleness_metrics(responses, run.step, limit=config.rollout.max_staleness)
    routing = routing_of(config, run.inputs.arch)
    packs, sizes = make_mini_batches(
        config, responses, run.groups, run.layout, routing=routing, layers=run.policy.layers
    )
    step = Step(
        rollout=replace(responses, held={}, grades={}),  # the tokens are in packs, the grades counted
        packs=packs,
        sizes=sizes,
        metrics=metrics,
        warm=run.policy.optimizer_steps >= config.optimizer.warmup_steps,
        moved=metrics["rollout/staleness/max"] > 0,
    )
    if config.rollout.old_log_probs == "sampled":
        sampled = [batch.sampled_log_probs for batch in packs]
        step.packs = packs.with_columns(old_log_probs=sampled)
        step.on_policy = False
    elif needs_old_pass(config):
        score_old(run, step)
    if config.loss.kl_coef:
        # Without its adapters the policy is the base; else the reference is a second model.
        with (
            run.log.phase("ref", len(packs), "pack", run.timings) as progress,
            without_adapters(run.policy.chunks),
        ):
            scores = (run.reference or run.policy).score(step.packs, run.scoring)
            progress(len(packs))
        step.packs = step.packs.with_columns(reference_log_probs=scores)
    return step


def needs_old_pass(config: Config) -> bool:
    """Return True if the trainer scores the responses before the first update.

    Before a single optimizer step old and new log-probs are the same. But a sampler apart from the trainer is
    to be measured all the same, and a correction needs the measurement.
    """
    if config.rollout.old_log_probs == "sampled":
        return False
    several = config.batch.mini_batches * config.batch.epochs > 1
    return several or config.rollout.engine == "vllm" or config.correction.name != "none"


def score_old(run: Training, step: Step) -> None:
    """Log-probs before the first update, with the packs of the training pass; compared with the sampler's.

    Gives the packs old log-probs and rollout weights, and the step the metrics of mismatch and correction.
    """
    with run.log.phase("old_log_prob", len(step.packs), "pack", run.timings) as progress:
        step.packs = old_pass(run, step)
        suspects = suspects_of(step.packs, step.packs.columns["old_log_probs"], run.groups)
        if drop_culprits(run, step, step.packs, suspects):
            step.packs = old_pass(run, step)  # old and new pass see the same packs
        progress(len(step.packs))
    alarm = make_alarm(run, step.rollout)
    mismatch = measure(step.packs, len(step.rollout), group=run.groups.dp_cp, also=alarm.add)
    alarmed, text = alarm.check(step.packs)
    if text is not None:
        run.log.warn("sampler and trainer differ", f"step {run.step + 1}: {text}")
    step.metrics |= mismatch.metrics | alarmed
    rule = run.inputs.config.correction
    if rule.name == "none":
        return
    step.packs, corrected = correct(rule, step.packs, mismatch, groups=run.groups)
    step.metrics |= corrected
    if (text := little_is_left(rule, step.metrics)) is not None:
        run.log.remind("correction", run.step + 1, text)


def old_pass(run: Training, step: Step) -> Packs:
    """The packs with log-probs and, of a mixture of experts, routes of a pass over them. Collective."""
    scores, passes = score(run, step.packs, run.scoring)
    packs = step.packs.with_columns(old_log_probs=scores)
    if passes is None:
        return packs
    step.old_report = passes.report()
    return packs.with_columns(routes=passes.routes())


def score(run: Training, packs: Packs, scoring: Scoring) -> tuple[list[Tensor], RouterPasses | None]:
    """Log-probs by the policy, with the sampler's routes where the run replays them. Collective."""
    packs, passes = run.policy.with_routers(packs, replay=run.inputs.config.moe.replay == "rollout")
    return run.policy.score(packs, scoring), passes


def make_alarm(run: Training, responses: Rollout) -> MismatchAlarm:
    """Return the alarm for these responses, with the limit of the run's precision."""
    rollout, parallel = run.inputs.config.rollout, run.inputs.config.parallel
    usual = FP8_LIMIT if run.inputs.config.fp8.recipe != "none" else LIMIT[run.inputs.dtype]
    return MismatchAlarm(
        fresh=responses.fresh_from(run.step).to(run.inputs.backend.device),
        version=run.step,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        limit=rollout.mismatch_limit or usual,
        rescore=lambda packs, temperature: score(run, packs, replace(run.scoring, temperature=temperature))[
            0
        ],
        # The interleaved schedule takes micro-batches by the number of stages.
        probe=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        groups=run.groups,
    )
