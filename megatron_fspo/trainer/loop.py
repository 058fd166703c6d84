"""The training loop.

prompts → responses → rewards → advantages → packs of responses (micro-batches) → their log-probs before the
first update (old log-probs) → optimizer steps → weights to the sampler: this is one step. "Collective" means
that all ranks must call a function.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext

from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.job.resume import Resume
from megatron_fspo.job.run_folder import hold_run_folder
from megatron_fspo.mcore.machine.startup import join
from megatron_fspo.trainer.advantages import check_variance, graded_responses, reward_metrics
from megatron_fspo.trainer.batch import pack_and_score
from megatron_fspo.trainer.build import build, export
from megatron_fspo.trainer.dynamic import fill
from megatron_fspo.trainer.evaluate import evaluate, evaluate_loss, num_responses
from megatron_fspo.trainer.metrics import profiled, rank_metrics, speed_metrics, table, update_metrics
from megatron_fspo.trainer.optimize import OptimizerStep, observe, update
from megatron_fspo.trainer.prepare import Inputs, machine
from megatron_fspo.trainer.rollout import sampling_metrics
from megatron_fspo.trainer.training import Draw, Training, end_of_step, finish_save, resumable


def train(inputs: Inputs, *, resume: Resume, draw: Draw | None = None) -> bool:
    """Lock the run folder, train to the last step, and export the model. Collective.

    ``resume`` is the value of ``--resume``; ``draw`` returns pictures for the trackers after an evaluation.

    Returns:
        False if SIGTERM stopped the run early. A checkpoint has the steps done, if any.

    Raises:
        RewardError: a reward failed, or too many steps had no advantages. A checkpoint has the steps done.
        TrainingError: as :func:`train_step`.
        InputError: another job holds the run folder, or a checkpoint cannot be read.
    """
    config, control = inputs.config, join(inputs.backend, parallel=inputs.config.parallel)
    evaluate_every, last = config.evaluation.every, config.run.steps
    with hold_run_folder(config, control, resume, inputs.compared) as folder:
        run = build(inputs, folder.checkpoints, older=resume == "auto")
        state, log = run.state, run.log
        folder.report(log.activity)
        with run.grader or nullcontext(), log.ending():
            signal.signal(signal.SIGTERM, lambda number, frame: control.request_stop())
            log.job(state.step, machine(inputs.backend))
            finished = True
            if state.step >= last:
                log.say(f"all {last} steps are done; for more, raise run.steps")
            try:
                if evaluate_every and not run.resumed:
                    log.step(0, _evaluate(run, draw))
                while state.step < last:
                    with profiled(config, inputs.backend, control, log, state.step + 1):
                        metrics = train_step(run)
                    state.step += 1
                    with end_of_step(run, folder, metrics):  # saves and logs, even if the evaluation fails
                        if evaluate_every and (state.step % evaluate_every == 0 or state.step == last):
                            metrics |= _evaluate(run, draw)
                run.engine.rest()
                export(run.policy, config, log)
            except StopRequested:
                finish_save(state, config, log, wait=True)
                log.say(f"stopped by SIGTERM after step {state.step}; continue with --resume")
                finished = False
            run.engine.close()
            log.close(table)
    return finished


def train_step(run: Training) -> dict[str, float]:
    """Run one rollout and all optimizer steps on it; return the step's metrics. Collective.

    Raises:
        StopRequested: a stop was requested. A checkpoint has all steps before this one, if any; ``--resume``
            repeats this one.
        RewardError: as :func:`train`.
        TrainingError: the policy diverged. The weights are those before the failed optimizer step.
    """
    inputs, groups, state, log = run.inputs, run.groups, run.state, run.log
    config, began, number = inputs.config, time.perf_counter(), state.step + 1
    log.timings.clear()
    log.activity.step = number
    metrics: dict[str, float] = {}
    with resumable(run, metrics):  # until all optimizer steps are taken
        groups.control.barrier("the first rank to write its records")
        responses = sampled = graded_responses(run.queue.take(state.step), inputs, groups, log)
        if config.rollout.dynamic_sampling:  # groups of equal rewards are replaced
            responses, sampled, rounds, note = fill(
                responses,
                lambda *asked: graded_responses(run.queue.further(state.step, *asked), inputs, groups, log),
                max_rounds=config.rollout.max_rounds,
            )
            metrics |= rounds
            if note:
                log.say(f"step {number}: {note}")
        environment, graded = inputs.environment is not None, not config.supervised
        metrics |= sampling_metrics(sampled, environment=environment, graded=graded)
        metrics |= reward_metrics(sampled, inputs, log, number)
        check_variance(sampled, inputs, groups, log, number)
        run.queue.ask(state.step)  # responses of later steps, if rollout.max_staleness allows them
        run.raise_if_stopping()
        run.engine.rest()

        batch, batch_metrics = pack_and_score(run, responses)
        metrics |= batch_metrics
        del responses, sampled  # frees memory: the micro-batches have the tokens
        run.raise_if_stopping()

        steps: list[OptimizerStep] = []
        mini_batches = batch.mini_batches * config.batch.epochs
        with log.phase("update_actor", len(mini_batches), "step") as progress:
            for mini_batch in mini_batches:
                steps.append(update(run, batch, mini_batch, before=steps))
                fresh = len(steps) <= len(batch.mini_batches)
                observe(steps[-1], state, groups, log, warm=batch.warm, fresh=fresh)
                progress(1)
                # Weights in the middle of a step are not saved, so it is given up only if all before it are.
                if state.saved == state.step and len(steps) < len(mini_batches):
                    run.raise_if_stopping()
    metrics |= update_metrics(run, batch, steps)
    metrics |= rank_metrics(run.policy, groups, state, log, batch.micro_batches.tokens * config.batch.epochs)

    with log.phase("update_weights"):
        run.engine.update_weights(number)
    metrics |= run.engine.metrics() | {"training/weight_version": float(number)}
    log.timings["timing_s/step"] = time.perf_counter() - began
    return metrics | speed_metrics(inputs, run.layout, batch.rollout, log.timings)


def _evaluate(run: Training, draw: Draw | None) -> dict[str, float]:
    if run.inputs.config.supervised:
        with run.log.phase("testing"):
            return evaluate_loss(run.inputs, run.policy, run.scoring, run.groups)
    total = num_responses(run.inputs) // run.groups.dp.size()
    with run.log.phase("testing", total, "response") as progress:
        try:
            result = evaluate(run.inputs, run.engine, run.groups, run.grader, progress)
        except RewardError as error:
            raise RewardError(f"evaluation after step {run.state.step}: {error}") from error
    run.log.responses(run.state.step, result.responses)
    run.log.pictures(run.state.step, draw)
    return result.metrics
