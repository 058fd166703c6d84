"""How a step begins: prompts → responses → rewards → advantages → packs → old log-probs."""

from __future__ import annotations

from megatron_fspo.errors import StopRequested
from megatron_fspo.trainer.batches import make_mini_batches
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.dynamic import fill
from megatron_fspo.trainer.no_spread import check_spread
from megatron_fspo.trainer.optimize import add_old_log_probs, score_reference
from megatron_fspo.trainer.rollout import Rollout, without_tokens
from megatron_fspo.trainer.rollout_queue import staleness_metrics
from megatron_fspo.trainer.sampling import (
    Batch,
    add_advantages,
    collect_and_grade,
    reward_metrics,
    sampling_metrics,
)
from megatron_fspo.trainer.step import Step

MOST_ENDED = 0.05
"""Share of verdicts that are 0 for want of a worker that lived, above which the run says so."""


def begin_step(run: Training) -> Step:
    """All of a step up to its first optimizer step. Collective.

    Raises:
        StopRequested: the job was asked to stop before all this was done.
        RewardError: the rewards of the rollout are no use.
    """
    responses, metrics = roll_out(run)
    if run.stopping():
        raise StopRequested("a stop was requested during the rollout")
    run.engine.rest()
    step = with_packs(run, responses, metrics)
    if run.stopping():
        raise StopRequested("a stop was requested during the old pass")
    return step


def roll_out(run: Training) -> tuple[Rollout, dict[str, float]]:
    """Responses to the next prompts, graded, with advantages; those of later steps, as far ahead as may be,
    are asked for. Collective. The metrics are of all that were sampled, also where only some stay."""
    options = run.inputs.config.rollout
    run.groups.control.meet("the first rank to write its records")
    responses = sampled = _responses(run, run.queue.take(run.step))
    metrics = sampling_metrics(responses)
    if options.dynamic_sampling:
        filled = fill(
            responses,
            lambda number, prompts: _responses(run, run.queue.further(run.step, number, prompts)),
            max_rounds=options.max_rounds,
        )
        responses, sampled = filled.batch, filled.sampled
        metrics = sampling_metrics(sampled) | filled.metrics()
        if filled.unfilled:
            run.log.say(f"step {run.step + 1}: {filled}")
    metrics |= reward_metrics(run.inputs, sampled)
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


def with_packs(run: Training, responses: Rollout, metrics: dict[str, float]) -> Step:
    """The step on these responses: packs, with their old log-probs. Collective."""
    config = run.inputs.config
    metrics |= staleness_metrics(responses, run.step, limit=config.rollout.max_staleness)
    device = run.inputs.backend.device
    packs, sizes = make_mini_batches(config, run.inputs.arch, responses, run.groups, device)
    responses = without_tokens(responses)
    step = Step(
        rollout=responses,
        packs=packs,
        sizes=sizes,
        metrics=metrics,
        warm=run.policy.optimizer_steps >= config.optimizer.warmup_steps,
    )
    add_old_log_probs(run, step)
    if run.reference is not None:
        step.packs = score_reference(run, step.packs)
    return step
