"""The training loop.

prompts → responses → rewards → advantages → packs → old log-probs → optimizer steps → weight update
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext

from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.job.folder import Resume
from megatron_fspo.job.run_folder import hold_run_folder
from megatron_fspo.mcore.machine.startup import join
from megatron_fspo.trainer.batch import pack_and_score
from megatron_fspo.trainer.build import build, export
from megatron_fspo.trainer.dynamic import fill
from megatron_fspo.trainer.evaluate import evaluate, responses_of
from megatron_fspo.trainer.metrics import profiled, rank_metrics, speed_metrics, table, update_metrics
from megatron_fspo.trainer.optimize import OptimizerStep, update
from megatron_fspo.trainer.prepare import Inputs, machine
from megatron_fspo.trainer.reward_report import check_spread, reward_metrics
from megatron_fspo.trainer.rollout import Rollout, sampling_metrics
from megatron_fspo.trainer.sampling import Request, add_advantages, collect_and_grade
from megatron_fspo.trainer.training import Draw, Training, end_of_step, end_save, resumable


def train(inputs: Inputs, *, resume: Resume, draw: Draw | None = None) -> bool:
    """Train to the last step and export the model, as the only job in the run folder. Collective.

    ``resume`` is the value of ``--resume``; ``draw`` draws pictures for the trackers after an evaluation.

    Returns:
        False if SIGTERM stopped the run early, with a checkpoint from which it can resume.

    Raises:
        RewardError: a reward failed, or too many steps had no spread. A checkpoint has the steps done.
    """
    control = join(inputs.backend, parallel=inputs.config.parallel)
    config, finished = inputs.config, True
    every, steps = config.evaluation.every, config.run.steps
    with hold_run_folder(config, control, resume) as folder:
        run = build(inputs, folder.checkpoints, older=resume == "auto")
        state, log = run.state, run.log
        folder.report(log.activity)
        with run.grader or nullcontext(), log.ending():
            signal.signal(signal.SIGTERM, lambda number, frame: control.request_stop())
            log.job(state.step, machine(inputs.backend))
            try:
                if every and not run.resumed:
                    log.step(0, _evaluate(run, draw))
                while state.step < steps:
                    with profiled(config, inputs.backend, control, log, state.step + 1):
                        metrics = train_step(run)
                    state.step += 1
                    with end_of_step(run, folder, metrics):
                        if every and (state.step % every == 0 or state.step == steps):
                            metrics |= _evaluate(run, draw)
                run.engine.rest()
                export(run.policy, config, log)
            except StopRequested:
                end_save(state, config, log, wait=True)
                log.say(f"stopped by SIGTERM after step {state.step}; continue with --resume")
                finished = False
            run.engine.close()
            log.close(table)
    return finished


def train_step(run: Training) -> dict[str, float]:
    """Run one rollout and all optimizer steps on it; return the step's metrics. Collective.

    Raises:
        StopRequested: a stop was requested. A checkpoint has all steps before this one, unless it is the
            first, and ``--resume`` repeats it.
        RewardError: as :func:`train`.
        TrainingError: the policy diverged. The weights are those before the optimizer step.
    """
    config, groups, state, log = run.inputs.config, run.groups, run.state, run.log
    began, number = time.perf_counter(), state.step + 1
    log.timings.clear()
    log.activity.step = number
    metrics: dict[str, float] = {}
    with resumable(run, metrics):
        groups.control.barrier("the first rank to write its records")

        def respond(request: Request) -> Rollout:
            total = len(request.prompts) * request.samples // groups.dp.size()
            with log.phase("gen", total, "response") as progress:
                graded = collect_and_grade(run.inputs, groups, request, progress, stops=True)
            return add_advantages(run.inputs, groups, graded)

        responses = sampled = respond(run.queue.take(state.step))
        rounds: dict[str, float] = {}
        if config.rollout.dynamic_sampling:
            responses, sampled, rounds, text = fill(
                responses,
                lambda round_, prompts: respond(run.queue.further(state.step, round_, prompts)),
                max_rounds=config.rollout.max_rounds,
            )
            if text:
                log.say(f"step {number}: {text}")
        metrics |= sampling_metrics(sampled, environment=run.inputs.environment is not None) | rounds
        metrics |= reward_metrics(sampled, run.inputs, log, number)
        check_spread(sampled, run.inputs, groups, log, number)
        run.queue.ask(state.step)  # the responses of later steps
        run.raise_if_stopping()
        run.engine.rest()

        batch, scores = pack_and_score(run, responses)
        metrics |= scores
        del responses, sampled  # frees memory: tokens are in the packs
        run.raise_if_stopping()

        steps: list[OptimizerStep] = []
        total = len(batch.mini_batches) * config.batch.epochs
        with log.phase("update_actor", total, "step") as progress:
            for mini_batch in batch.mini_batches * config.batch.epochs:
                steps.append(update(run, batch, mini_batch, steps))
                progress(1)
                # If all steps before are saved, a resumed run can repeat this one; else it is completed.
                if state.saved == state.step and len(steps) < total:
                    run.raise_if_stopping()
    metrics |= update_metrics(run, batch, steps)
    metrics |= rank_metrics(run.policy, groups, state, log, batch.packs.tokens * config.batch.epochs)

    with log.phase("update_weights", 1, ""):
        run.engine.update_weights(number)
    metrics |= run.engine.metrics() | {"training/weight_version": float(number)}

    log.timings["timing_s/step"] = time.perf_counter() - began
    return metrics | speed_metrics(run.inputs, run.layout, batch.rollout, log.timings)


def _evaluate(run: Training, draw: Draw | None) -> dict[str, float]:
    total = responses_of(run.inputs) // run.groups.dp.size()
    with run.log.phase("testing", total, "response") as progress:
        try:
            result = evaluate(run.inputs, run.engine, run.groups, run.grader, progress)
        except RewardError as error:
            raise RewardError(f"evaluation after step {run.state.step}: {error}") from error
    run.log.responses(run.state.step, result.responses)
    run.log.pictures(run.state.step, draw)
    return result.metrics
