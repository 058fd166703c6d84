"""The training loop.

prompts → responses → rewards → advantages → packs → old log-probs → optimizer steps → weight update
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext

from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.job.folder import Resume
from megatron_fspo.job.run_folder import RunFolder, hold_run_folder
from megatron_fspo.mcore.hf_weights import export_adapters, export_hf
from megatron_fspo.mcore.lora import share_lost_by_merging
from megatron_fspo.mcore.startup import join
from megatron_fspo.trainer.begin import begin_step
from megatron_fspo.trainer.build import Draw, Training, build
from megatron_fspo.trainer.evaluate import evaluate, responses_of
from megatron_fspo.trainer.metrics import profiled, rank_metrics, speed_metrics, table, update_metrics
from megatron_fspo.trainer.optimize import optimize
from megatron_fspo.trainer.prepare import Inputs, machine


def train(inputs: Inputs, *, resume: Resume, draw: Draw | None = None) -> bool:
    """Train to the last step and export the model, as the only job in the run folder. Collective.

    ``resume`` is the value of ``--resume``; ``draw`` draws pictures for the trackers after an evaluation.

    Returns:
        False if SIGTERM stopped the run early, with a checkpoint from which it can resume.

    Raises:
        RewardError: a reward failed, or too many steps had no spread. A checkpoint has the steps done.
    """
    control = join(inputs.backend, parallel=inputs.config.parallel)
    with hold_run_folder(inputs.config, control, resume) as folder:
        run = build(inputs, folder.checkpoints, older=resume == "auto")
        run.draw = draw
        folder.report(run.log.activity)
        with run.grader or nullcontext(), run.log.ending():
            return _train(run, folder)


def _train(run: Training, folder: RunFolder) -> bool:
    config, control = run.inputs.config, run.groups.control
    signal.signal(signal.SIGTERM, lambda number, frame: control.request_stop())
    run.log.job(run.step, machine(run.inputs.backend))
    if config.evaluation.every and not run.resumed:
        run.log.step(0, _evaluate(run))
    while run.step < config.run.steps:
        with profiled(run):
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
            except StopRequested:
                stopping = True
                run.log.say(f"no evaluation after step {run.step}: stopped while waiting for grades")
        end = last or stopping or failed is not None
        if end or any(_due(run.step, n) for n in (config.checkpoint.every, config.checkpoint.milestones)):
            with run.log.phase("save_checkpoint", 1, "", run.timings):
                run.save(wait=end)
        folder.check()
        # Log the metrics before the checkpoint gets its name, so that a resumed run has them.
        run.log.step(run.step, metrics | run.timings)
        run.end_save(wait=failed is not None, prune=failed is None)
        if failed is not None:
            raise failed
        if stopping and not last:
            return _stopped(run)
    run.engine.rest()
    export_hf(run.policy, config.run_folder / "hf", source=config.model.checkpoint)
    if run.policy.arch.adapters:
        export_adapters(run.policy, config.run_folder / "adapter", base=config.model.checkpoint)
        lost = share_lost_by_merging(run.policy.chunks, run.policy.arch)
        kept = f"{config.run_folder}/adapter has the adapters in PEFT's format"
        run.log.say(f"{kept}. They are also merged into hf/, where rounding lost {lost:.1%} of their change")
    run.engine.close()
    run.log.close(table)
    return True


def train_step(run: Training) -> dict[str, float] | None:
    """Run one rollout and all optimizer steps on it. Collective.

    Returns:
        the step's metrics, or None if a stop was requested and the step was discarded. Then a checkpoint has
        all steps before it, unless it is the first, and ``--resume`` repeats the step.
    """
    run.timings.clear()
    run.log.activity.step = run.step + 1
    began = time.perf_counter()
    cursor = run.queue.prompts.state_dict()
    try:
        step = begin_step(run)
    except StopRequested:
        run.save(wait=True, cursor=cursor)
        return None
    except RewardError as error:
        going_on = "--resume starts over"  # nothing to save before the first step
        if run.step:
            run.save(wait=True, cursor=cursor)
            run.end_save(wait=True, prune=False)
            going_on = f"--resume continues after step {run.step}"
        raise RewardError(f"step {run.step + 1}: {error}; {going_on}") from error
    if not optimize(run, step):
        return None
    metrics = step.metrics | update_metrics(run, step) | rank_metrics(run, step)

    with run.log.phase("update_weights", 1, "", run.timings):
        run.engine.update_weights(run.step + 1)
    metrics |= run.engine.metrics()

    metrics |= speed_metrics(run, step, time.perf_counter() - began)
    return metrics | {"training/weight_version": float(run.step + 1)}


def _stopped(run: Training) -> bool:
    """End a run that SIGTERM stopped, after its checkpoint was written."""
    run.end_save(wait=True)
    run.log.say(f"stopped by SIGTERM after step {run.step}; continue with --resume")
    run.engine.close()
    run.log.close(table)
    return False


def _evaluate(run: Training) -> dict[str, float]:
    total = responses_of(run.inputs) // run.groups.dp.size()
    with run.log.phase("testing", total, "response", run.timings) as progress:
        try:
            result = evaluate(run.inputs, run.engine, run.groups, run.grader, progress)
        except RewardError as error:
            raise RewardError(f"evaluation after step {run.step}: {error}") from error
    run.log.responses(run.step, result.responses)
    run.log.pictures(run.step, run.draw)
    return result.metrics


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
