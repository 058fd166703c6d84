"""How a run is left before its last step: with a checkpoint to go on from."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_fspo.errors import RewardError
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.speed import table


def stopped(run: Training) -> bool:
    """End a run that SIGTERM stopped and whose checkpoint is written."""
    run.end_save(wait=True)
    run.log.say(f"stopped by SIGTERM after step {run.step}; continue with --resume")
    run.engine.close()
    run.log.close(table)
    return False


def fail_after_save(run: Training, error: RewardError, cursor: dict[str, Any]) -> NoReturn:
    """End a run in a rollout, with a checkpoint of the steps before; of none there is nothing to keep."""
    going_on = "--resume starts over"
    if run.step:
        run.save(wait=True, cursor=cursor)
        run.end_save(wait=True, prune=False)
        going_on = f"--resume goes on after step {run.step}"
    raise RewardError(f"step {run.step + 1}: {error}; {going_on}") from error
