"""The algorithm.

prompts → responses → rewards → advantages → packs → old log-probs → optimizer steps → next weights
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from typing import Any, NoReturn

from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.mcore.hf_weights import export_hf
from megatron_fspo.trainer.begin import begin_step
from megatron_fspo.trainer.build import Training, build
from megatron_fspo.trainer.evaluate import evaluate
from megatron_fspo.trainer.folder import Resume
from megatron_fspo.trainer.optimize import optimize, update_metrics
from megatron_fspo.trainer.place import Place, in_folder
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.slow import slow_rank_metrics


def train(inputs: Inputs, *, resume: Resume) -> bool:
    """Run to the last step, then export, as the only job in its folder. Collective.

    Returns:
        False when SIGTERM stopped the run early; it left a checkpoint to resume from.

    Raises:
        RewardError: the rewards of a step or an evaluation are no use. A checkpoint has the steps done.
    """
    with in_folder(inputs, resume) as place:
        run = build(inputs, place.checkpoints, older=resume == "auto")
        with run.grader or nullcontext(), run.beating(place.job):
            return _train(run, place)


def _train(run: Training, place: Place) -> bool:
    config, control = run.inputs.config, run.groups.control
    signal.signal(signal.SIGTERM, lambda number, frame: control.request_stop())
    if config.evaluation.every and not run.resumed:
        run.log.step(0, _evaluate(run))
    while run.step < config.run.steps:
        metrics = train_step(run)
        if metrics is None:
            return _stopped(run)
        run.step += 1
        last = run.step == config.run.steps
        stopping = control.meet(f"the end of step {run.step}")
        failed: RewardError | None = None
        if _due(run.step, config.evaluation.every) or (last and config.evaluation.every):
            try:
                metrics |= _evaluate(run)
            except RewardError as error:
                failed = error
        end = last or stopping or failed is not None
        if end or any(_due(run.step, n) for n in (config.checkpoint.every, config.checkpoint.milestones)):
            with run.log.phase("save_checkpoint", 1, "", run.timings):
                run.save(wait=end)
        place.check()
        # First the row, then the name of the checkpoint: a run that resumes from it has the row.
        run.log.step(run.step, metrics | run.timings)
        run.end_save(wait=failed is not None)
        if failed is not None:
            raise failed
        if stopping and not last:
            return _stopped(run)
    export_hf(run.policy, config.run_folder / "hf", source=config.model.checkpoint)
    run.engine.close()
    run.log.close()
    return True


def train_step(run: Training) -> dict[str, float] | None:
    """One rollout and all optimizer steps on it.

    Returns:
        its metrics; None where the job was asked to stop before its end. It left a checkpoint then: of the
        steps before it, if no optimizer step was taken yet, else of all that was done.
    """
    run.timings.clear()
    run.log.activity.step = run.step + 1
    began = time.perf_counter()
    cursor = run.queue.state_dict()
    if run.under_way is None:
        try:
            run.under_way = begin_step(run)
        except StopRequested:
            run.save(wait=True, cursor=cursor)
            return None
        except RewardError as error:
            _fail_after_save(run, error, cursor)
    else:  # the checkpoint that the run goes on from had it
        run.queue.ask(run.step)
    step = run.under_way
    if not optimize(run, step):
        run.save(wait=True)
        return None
    run.under_way = None
    metrics = step.metrics | update_metrics(run, step) | slow_rank_metrics(run, step)

    with run.log.phase("update_weights", 1, "", run.timings):
        run.engine.update_weights(run.step + 1)
    metrics |= run.engine.metrics()

    seconds = time.perf_counter() - began
    run.timings["timing_s/step"] = seconds
    tokens = int((step.rollout.prompt_lengths + step.rollout.lengths).sum())
    return metrics | {"perf/throughput": tokens / seconds, "training/weight_version": float(run.step + 1)}


def _stopped(run: Training) -> bool:
    """End a run that SIGTERM stopped and whose checkpoint is written."""
    run.end_save(wait=True)
    within = f", {len(run.under_way.updates)} optimizer steps into the next" if run.under_way else ""
    run.log.say(f"stopped by SIGTERM after step {run.step}{within}; continue with --resume")
    run.engine.close()
    run.log.close()
    return False


def _fail_after_save(run: Training, error: RewardError, cursor: dict[str, Any]) -> NoReturn:
    """End a run in a rollout, with a checkpoint of the steps before; of none there is nothing to keep."""
    going_on = "--resume starts over"
    if run.step:
        run.save(wait=True, cursor=cursor)
        run.end_save(wait=True)
        going_on = f"--resume goes on after step {run.step}"
    raise RewardError(f"step {run.step + 1}: {error}; {going_on}") from error


def _evaluate(run: Training) -> dict[str, float]:
    total = len(run.inputs.validation) * run.inputs.config.evaluation.samples // run.groups.dp.size()
    with run.log.phase("testing", total, "response", run.timings) as progress:
        try:
            result = evaluate(run.inputs, run.engine, run.groups, run.grader, progress)
        except RewardError as error:
            raise RewardError(f"evaluation after step {run.step}: {error}") from error
    run.log.responses(run.step, result.responses)
    return result.metrics


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
