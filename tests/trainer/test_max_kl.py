"""A policy that runs away from the one that sampled ends the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from configs import make_config
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.trainer.optimize import check_kl


def check(folder: Path, kl: float, **optimizer: float) -> list[Any]:
    """What is called of a run, and the error that ends it."""
    run, step = mock.Mock(step=4, timings={}), mock.Mock(metrics={"reward": 0.5}, updates=[None, None])
    run.inputs.config, run.inputs.backend = make_config(folder, optimizer=optimizer), choose_backend("cpu")
    totals = {"actor/ppo_kl": (0.0, 0.0) if math.isnan(kl) else (100 * kl, 100.0), "fspo/kl_k3": (1e9, 100.0)}
    try:
        check_kl(run, step, totals)
    except TrainingError as error:
        return [*run.method_calls, str(error)]
    return run.method_calls


@pytest.mark.parametrize("kl", [0.0, 0.999, -3.0, math.nan])
def test_up_to_the_limit_nothing_happens(tmp_path: Path, job: None, kl: float) -> None:
    """NaN: no token is in a pack. k3 does not matter, however large."""
    assert check(tmp_path, kl) == []


@pytest.mark.parametrize("there", [True, False])
def test_beyond_it_the_row_so_far_is_written_and_all_is_named(tmp_path: Path, job: None, there: bool) -> None:
    if there:
        (tmp_path / "one/checkpoints/step_000004").mkdir(parents=True)
    saved, row, error = check(tmp_path, 0.3, max_kl=0.25)
    assert saved == mock.call.end_save(wait=True, prune=False), "a checkpoint being written is not lost"
    metrics = {"reward": 0.5, "actor/ppo_kl": pytest.approx(0.3), "fspo/kl_k3": 1e7}
    assert row == mock.call.log.step(5, metrics)
    assert error.startswith("step 5, optimizer step 3: the policy is 0.3 nats per token (actor/ppo_kl)")
    assert "optimizer.max_kl allows 0.25" in error
    assert (f"The last checkpoint is {tmp_path}/one/checkpoints/step_000004" in error) == there
    assert ("There is no checkpoint yet" in error) != there
