"""The first half of a step: prompts → responses → rewards → advantages → packs → old log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.job.folder import newest_checkpoint
from megatron_fspo.mcore.lora import without_adapters
from megatron_fspo.parallel.groups import agreed, means
from megatron_fspo.rewards import tally
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.correction import correct, little_is_left
from megatron_fspo.trainer.mismatch import FP8_LIMIT, LIMIT, MismatchAlarm, measure
from megatron_fspo.trainer.optimize import Step, is_stopping
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
"""Share of rewards that are 0 because their grader worker ended, above which the run warns."""
_SHOWN = 3
"""Number of responses in the message about a step without spread."""
_CHARACTERS = 80
"""Number of characters of a text in that message."""


def begin_step(run: Training) -> Step:
    """Run a step up to its first optimizer step. Raises ``StopRequested`` if a stop was requested meanwhile,
    and ``RewardError`` if a reward failed or too many steps in a row had no spread. Collective."""
    responses, metrics = roll_out(run)
    if is_stopping(run):
        raise StopRequested("a stop was requested during the rollout")
    run.engine.rest()
    step = with_packs(run, responses, metrics)
    if is_stopping(run):
        raise StopRequested("a stop was requested during the old pass")
    return step


def roll_out(run: Training) -> tuple[Rollout, dict[str, float]]:
    """Return graded responses to the next prompts, with advantages, and the metrics of all sampled responses,
    including those that dynamic sampling drops. Requests the responses of later steps. Collective."""
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
            f"{ended:.1%} of the rewards are 0 because a grader worker hit its limits or died twice: check "
            "reward.seconds, reward.memory_gb and the machine's free memory",
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
    """The batch of a step that dynamic sampling (DAPO, arXiv 2503.14476) chose from several rounds.

    Groups whose rewards are all equal have no gradient. They are replaced by groups of further prompts,
    sampled in rounds by the current weights, until the batch is full or the rounds are used up. Groups are
    taken in the order of their prompts, after all responses of a round are complete, so that the choice does
    not depend on speed. All ranks make the same choice.
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
        """Return metrics under ``rollout/dynamic/``. ``rounds`` and ``prompts_sampled`` include the first
        round; ``groups_dropped`` had no spread; ``groups_surplus`` had, but the batch was full; ``unfilled``
        are groups of the batch without spread; rewards and lengths are means over the batch."""
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
    """Sample further prompts until the batch, of the first round's size, has only groups with spread.
    Collective.

    Args:
        first: the first round.
        further: ``(round number from 1, number of prompts)`` → responses with advantages. Collective.
        max_rounds: maximum number of rounds, including the first. If they do not suffice, groups without
            spread stay in the batch, so that its size is the same in every step.
    """
    size = len(first.prompts)
    rounds, full, sampled = [first], int(first.spread.sum()), size
    while full < size and len(rounds) < max_rounds:
        # Enough to fill the batch if the share of groups with spread stays the same.
        count = min(size, -(-(size - full) * sampled // full)) if full else size
        rounds.append(further(len(rounds), count))
        full += int(rounds[-1].spread.sum())
        sampled += count
    together = join(rounds)
    spread = together.spread.tolist()
    # If too few groups have spread, add the first ones without; in prompt order, to mix the mini-batches.
    chosen = sorted(range(sampled), key=lambda group: not spread[group])[:size]
    return Filled(batch=select(together, sorted(chosen)), sampled=together, rounds=len(rounds))


def check_spread(run: Training, sampled: Rollout) -> None:
    """Warn, with a few responses, if all advantages of the step are 0. Raises ``RewardError`` on every rank
    after ``reward.max_steps_without_spread`` such steps in a row. Collective.

    The usual cause is the reward function: if it expects the bare answer but the policy explains it, all
    rewards are 0. ``sampled`` includes the responses that dynamic sampling dropped.
    """
    if sampled.spread.any():
        return
    count = 1 + agreed(run.log.steps_without_spread(), run.groups)
    options = run.inputs.config.reward
    lowest, highest = sampled.rewards.min().item(), sampled.rewards.max().item()
    if lowest == highest:
        what = f"all {len(sampled)} rewards are {lowest:g}"
    elif bool((sampled.rewards.view(-1, sampled.samples).diff(dim=1) == 0).all()):
        what = f"no two of a prompt's {sampled.samples} rewards differ (they are {lowest:g} to {highest:g})"
    else:
        cut = f"{int(sampled.truncated.sum())} of {len(sampled)} responses are cut"
        what = f"all advantages are 0: {cut}, and reward.truncated = {options.truncated}"
    lines = [f"step {run.step + 1}: {what}: nothing to learn from (steps in a row: {count})"]
    # Responses that this rank holds, each to another prompt as far as possible.
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
        before = f"{good} is from before them: to continue from it, remove the newer ones" if good else ""
        raise RewardError(
            f"reward {options.name!r}: {what}, and {count} steps in a row had nothing to learn from "
            f"(reward.max_steps_without_spread = {limit}; 0 disables this error). "
            f"{before or 'No checkpoint is from before them'}"
        )


def _short(text: str) -> str:
    """Shorten a text to its beginning and its end, which usually has the answer, on one line."""
    half = _CHARACTERS // 2
    return repr(text if len(text) <= _CHARACTERS else f"{text[:half]} … {text[-half:]}")


def with_packs(run: Training, responses: Rollout, metrics: dict[str, float]) -> Step:
    """Return a step with the packs of these responses. These have old log-probs, unless they equal the new
    ones; the weights of a correction; and for a KL penalty the reference policy's log-probs. Collective."""
    config = run.inputs.config
    metrics |= staleness_metrics(responses, run.step, limit=config.rollout.max_staleness)
    routing = routing_of(config, run.inputs.arch)
    packs, sizes = make_mini_batches(
        config, responses, run.groups, run.layout, routing=routing, layers=run.policy.layers
    )
    step = Step(
        rollout=replace(responses, held={}, grades={}),  # frees memory: tokens are in the packs
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
        # With LoRA the reference is the policy without its adapters; otherwise it is a second model.
        with (
            run.log.phase("ref", len(packs), "pack", run.timings) as progress,
            without_adapters(run.policy.chunks),
        ):
            scores = (run.reference or run.policy).score(step.packs, run.scoring)
            progress(len(packs))
        step.packs = step.packs.with_columns(reference_log_probs=scores)
    return step


def needs_old_pass(config: Config) -> bool:
    """Return True if the trainer scores the responses before the first update. With one optimizer step per
    rollout this only serves to measure the mismatch with vLLM, or for a correction."""
    if config.rollout.old_log_probs == "sampled":
        return False
    several = config.batch.mini_batches * config.batch.epochs > 1
    return several or config.rollout.engine == "vllm" or config.correction.name != "none"


def score_old(run: Training, step: Step) -> None:
    """Score the step's packs before the first update, and compare the log-probs with the sampler's. Adds old
    log-probs and rollout weights to the packs, and metrics of mismatch and correction. Collective."""
    with run.log.phase("old_log_prob", len(step.packs), "pack", run.timings) as progress:
        replay = run.inputs.config.moe.replay == "rollout"
        packs, passes = run.policy.with_routers(step.packs, replay=replay)
        step.packs = step.packs.with_columns(old_log_probs=run.policy.score(packs, run.scoring))
        if passes is not None:
            step.old_report = passes.report()
            step.packs = step.packs.with_columns(routes=passes.routes())
        progress(len(step.packs))
    alarm = make_alarm(run, step.rollout)
    mismatch = measure(step.packs, len(step.rollout), group=run.groups.dp_cp, also=alarm.add)
    alarmed, text = alarm.check()
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


def make_alarm(run: Training, responses: Rollout) -> MismatchAlarm:
    """Return the alarm for these responses; its default limit depends on the precision."""
    rollout = run.inputs.config.rollout
    usual = FP8_LIMIT if run.inputs.config.fp8.recipe != "none" else LIMIT[run.inputs.dtype]
    return MismatchAlarm(
        fresh=responses.fresh_from(run.step).to(run.inputs.backend.device),
        version=run.step,
        top_p=rollout.top_p,
        limit=rollout.mismatch_limit or usual,
        groups=run.groups,
    )
