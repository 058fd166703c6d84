"""A policy that runs away from the one that sampled ends the run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch import forked, why
from megatron_fspo.config import Optimizer
from megatron_fspo.errors import TrainingError
from megatron_fspo.trainer.optimize import check_kl
from runs import PROGRAM, rows, train_words


def check(folder: Path, kl: float, **optimizer: float) -> list[Any]:
    """The rows that are written."""
    written: list[Any] = []
    run: Any = SimpleNamespace(
        step=4,
        timings={},
        end_save=lambda *, wait, prune: written.append("saved"),
        log=SimpleNamespace(step=lambda *row: written.append(row)),
        inputs=SimpleNamespace(
            backend=SimpleNamespace(device=torch.device("cpu")),
            config=SimpleNamespace(optimizer=Optimizer(**optimizer), run_folder=folder),
        ),
    )
    step: Any = SimpleNamespace(metrics={"critic/rewards/mean": 0.5}, updates=[None, None])
    count = 0.0 if math.isnan(kl) else 100.0
    totals = {"actor/ppo_kl": (0.0 if math.isnan(kl) else 100 * kl, count), "fspo/kl_k3": (1e9, 100.0)}
    try:
        check_kl(run, step, totals)
    except TrainingError as error:
        written.append(str(error))
    return written


@pytest.mark.parametrize("kl", [0.0, 0.999, -3.0, math.nan])
def test_up_to_the_limit_nothing_happens(tmp_path: Path, job: None, kl: float) -> None:
    """NaN: no token is in a pack. k3 does not matter, however large."""
    assert check(tmp_path, kl) == []


@pytest.mark.parametrize("there", [True, False])
def test_beyond_it_the_row_so_far_is_written_and_all_is_named(tmp_path: Path, job: None, there: bool) -> None:
    if there:
        (tmp_path / "checkpoints/step_000004").mkdir(parents=True)
    saved, row, error = check(tmp_path, 0.3, max_kl=0.25)
    assert saved == "saved", "a checkpoint that is being written is not lost"
    assert (
        row[0] == 5 and row[1]["critic/rewards/mean"] == 0.5 and row[1]["actor/ppo_kl"] == pytest.approx(0.3)
    )
    assert error.startswith("step 5, optimizer step 3 of it: the policy is 0.3 nats per token (actor/ppo_kl)")
    assert "optimizer.max_kl allows 0.25" in error
    assert (f"The last checkpoint is {tmp_path}/checkpoints/step_000004" in error) == there
    assert ("There is no checkpoint yet" in error) != there


def test_a_learning_rate_of_1000_does_not_end_with_status_0(tmp_path: Path) -> None:
    extra = "--parallel.tensor 1 --parallel.sequence false --run.steps 3 --evaluation.every 0".split()
    words = train_words(tmp_path, "wild", *extra, "--optimizer.lr", "1000")
    result = forked([*PROGRAM, *words], nproc=0)
    assert result.returncode == 1, why(result.stderr)
    assert "optimizer.max_kl allows 1." in result.stderr
    assert rows(tmp_path, "wild")[-1]["actor/ppo_kl"] > 1
