"""Gradient spikes move nothing, and too many end the run."""

from __future__ import annotations

import json
import math
import shutil
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from configs import make_config
from launch import why
from megatron_fspo.trainer.optimize import skip_reason
from megatron_fspo.trainer.training import State
from runs import faulty, rows

WORDS = (
    "--parallel.tensor 1 --parallel.sequence false --evaluation.every 0 --checkpoint.every 1 "
    "--rollout.samples 12 "
    "--optimizer.skip-norm-ratio 100 --optimizer.skip-window 8 --optimizer.max-skips 2"
).split()


class Steps:
    """The optimizer steps of a run that has taken nine."""

    def __init__(self, ratio: float | None = 10.0) -> None:
        self.options = make_config(Path(), optimizer={"skip_norm_ratio": ratio, "skip_window": 9}).optimizer
        self.state = State(step=4, loss=mock.Mock(), norms=deque(maxlen=9), skips_in_a_row=0, saved=0)
        for norm in (1.0, 2.0, 0.0, 3.0, 2.0, 2.0, 2.0, 1e9, 2.0, 2.0):
            assert self.reason(norm) is None, "too few are known"

    def reason(self, norm: float, *suspects: str) -> str | None:
        return skip_reason(self.state, self.options, norm, suspects, torch.device("cpu"))


def test_more_than_so_many_times_the_median_is_a_spike(job: None) -> None:
    steps = Steps()
    assert steps.reason(20.01) and steps.reason(20.02) and steps.state.skips_in_a_row == 2
    assert not steps.reason(20.0) and steps.state.skips_in_a_row == 0
    for _ in range(5):
        assert not steps.reason(8.0)
    assert not steps.reason(80.0) and steps.reason(80.01), "the median is of the last 9"


def test_off_unless_asked_for(job: None) -> None:
    assert not Steps(ratio=None).reason(1e9)


def test_a_gradient_that_is_not_finite_is_skipped_whatever_the_ratio(job: None) -> None:
    for ratio in (None, 10.0):
        steps = Steps(ratio)
        norms = list(steps.state.norms)
        assert "every log-prob is" in (steps.reason(math.nan) or "")
        assert "log-probs of a; b" in (steps.reason(math.nan, "a", "b") or "")
        assert steps.state.skips_in_a_row == 2
        assert list(steps.state.norms) == norms, "the median is of finite ones"
        assert not steps.reason(2.0) and steps.state.skips_in_a_row == 0


def train(folder: Path, name: str, steps: str, *extra: str) -> tuple[Any, list[Any]]:
    """The run with spikes in these optimizer steps; and what either rank found."""
    out = folder / f"{name}.json"
    result = faulty(folder, name, ["spikes", str(out), steps], *WORDS, *extra)
    return result, [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_spikes_on_one_rank_are_skipped_by_all_and_end_the_run_across_a_resume(tmp_path: Path) -> None:
    result, found = train(tmp_path, "run", "9,11,12", "--run.steps", "3")
    assert result.returncode == 0, why(result.stderr)
    assert found[0] == found[1]
    assert [number for number, one in enumerate(found[0], 1) if one["skipped"]] == [9, 11, 12]
    assert [number for number, one in enumerate(found[0], 1) if not one["moved"]] == [9, 11, 12]
    assert [row["actor/skipped_updates"] for row in rows(tmp_path, "run")] == [0, 0, 3]
    assert "step 3, optimizer step 1: skipped because the gradient norm is " in result.stdout
    assert "(in a row: 2)" in result.stdout

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    result, found = train(tmp_path, "run", "1", "--run.steps", "4", "--resume")
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("megatron-fspo: step 4")]
    assert line.startswith("megatron-fspo: step 4, optimizer step 1: the gradient norm is ")
    assert "skip 3 in a row" in line and "optimizer.max_skips allows 2" in line
    assert f"The last checkpoint is {tmp_path}/run/checkpoints/step_000003" in line
    assert rows(tmp_path, "run")[-1]["step"] == 4

    result, found = train(tmp_path, "again", "99", "--run.steps", "4", "--resume")
    assert result.returncode == 0, why(result.stderr)
    assert all(one["moved"] and not one["skipped"] for one in found[0])
