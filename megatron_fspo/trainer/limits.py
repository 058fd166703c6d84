"""What is asked once the gradient of an optimizer step is known, before it moves the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from megatron_fspo.errors import TrainingError
from megatron_fspo.job.folder import checkpoints
from megatron_fspo.parallel.metrics import Totals, any_rank, means
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.step import Step


def check_kl(run: Training, step: Step, totals: Totals) -> None:
    """Stop a run whose policy has left the one that S starts from: what follows would be learned from noise.
    Collective.

    By k1, the mean of log π_old - log π: it is unbiased, and a token moves it by its log-ratio only. In k3
    one rare token that became likely counts e^15, which is no reason to stop.

    Raises:
        TrainingError: before the weights move; a row of the step so far is in the log.
    """
    metrics = means(totals)
    kl, limit = metrics["actor/ppo_kl"], run.inputs.config.optimizer.max_kl
    # Tensor-parallel ranks need not agree on the last bits.
    if not any_rank(kl > limit, device=run.inputs.backend.device):
        return
    _end(
        run,
        step,
        metrics,
        f"the policy is {kl:.3g} nats per token (actor/ppo_kl) from the one that S starts from; "
        f"optimizer.max_kl allows {limit:g}",
    )


def is_to_be_skipped(run: Training, step: Step, totals: Totals, grad_norm: float) -> bool:
    """Whether the gradient is a spike, so that this optimizer step moves nothing; tells it. Collective.

    Raises:
        TrainingError: as :func:`check_kl`; too many in a row.
    """
    spikes, options = run.spikes, run.inputs.config.optimizer
    if not spikes.on:
        return False
    usual = spikes.median
    if not any_rank(spikes.is_spike(grad_norm), device=run.inputs.backend.device):
        spikes.taken(grad_norm)
        return False
    spikes.skipped()
    found = f"the gradient norm is {grad_norm:.3g}, the median of those before it {usual:.3g}"
    if spikes.in_a_row > options.max_skips:
        _end(
            run,
            step,
            means(totals) | {"actor/grad_norm": grad_norm},
            f"{found}, a spike in {spikes.in_a_row} steps in a row; optimizer.skip_norm_ratio = "
            f"{options.skip_norm_ratio:g} skips such a step, optimizer.max_skips allows {options.max_skips}",
        )
    run.log.warn(
        "gradient spike",
        f"step {run.step + 1}, optimizer step {len(step.updates) + 1} of it: skipped, as {found} "
        f"(in a row: {spikes.in_a_row})",
    )
    return True


def _end(run: Training, step: Step, metrics: Mapping[str, float], reason: str) -> NoReturn:
    """End the run before the optimizer step, with a row of the step so far. Collective."""
    run.end_save(wait=True, prune=False)
    run.log.step(run.step + 1, {**step.metrics, **metrics, **run.timings})
    written = checkpoints(run.inputs.config)
    last = f"The last checkpoint is {written[-1]}" if written else "There is no checkpoint yet"
    raise TrainingError(
        f"step {run.step + 1}, optimizer step {len(step.updates) + 1} of it: {reason}. {last}. "
        "Use a smaller optimizer.lr, or fewer batch.mini_batches or batch.epochs"
    )
