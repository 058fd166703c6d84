"""A policy that runs away from the one that sampled ends the run; what the end of a step leaves behind."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import torch

from configs import make_config
from megatron_fspo.errors import Diverged, StopRequested, TrainingError
from megatron_fspo.trainer import training
from megatron_fspo.trainer.optimize import check_kl
from megatron_fspo.trainer.training import resumable


def check(kl: float, limit: float = 1.0) -> None:
    totals = {"actor/ppo_kl": (0.0, 0.0) if math.isnan(kl) else (100 * kl, 100.0), "fspo/kl_k3": (1e9, 100.0)}
    check_kl(totals, limit, "step 5, optimizer step 3", torch.device("cpu"))


@pytest.mark.parametrize("kl", [0.0, 0.999, -3.0, math.nan])
def test_up_to_the_limit_nothing_happens(job: None, kl: float) -> None:
    """NaN: no token is in a pack. k3 does not matter, however large."""
    check(kl)


@pytest.mark.parametrize("there", [True, False])
def test_beyond_it_the_row_so_far_is_written_and_all_is_named(
    tmp_path: Path, job: None, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        (tmp_path / "one/checkpoints/step_000004").mkdir(parents=True)
    run, ended = mock.Mock(), mock.Mock()
    run.state.step, run.inputs.config, run.log.timings = 4, make_config(tmp_path), {"timing_s/gen": 1.0}
    monkeypatch.setattr(training, "finish_save", ended)
    with pytest.raises(TrainingError) as raised, resumable(run, {"reward": 0.5}):
        check(0.3, limit=0.25)
    assert not isinstance(raised.value, Diverged)
    named = mock.call(run.state, run.inputs.config, run.log, wait=True, prune=False)
    assert ended.mock_calls == [named], "a checkpoint that is being written"
    metrics = {"reward": 0.5, "actor/ppo_kl": pytest.approx(0.3), "fspo/kl_k3": 1e7, "timing_s/gen": 1.0}
    assert run.log.mock_calls == [mock.call.step(5, metrics)]
    error = str(raised.value)
    assert error.startswith("step 5, optimizer step 3: the policy is 0.3 nats per token (actor/ppo_kl)")
    assert "optimizer.max_kl allows 0.25" in error
    assert (f"The last checkpoint is {tmp_path}/one/checkpoints/step_000004" in error) == there
    assert ("There is no checkpoint yet" in error) != there


@pytest.mark.parametrize(("saved", "times"), [(2, 1), (4, 0)])
def test_a_stop_saves_the_steps_done_unless_they_are(
    monkeypatch: pytest.MonkeyPatch, saved: int, times: int
) -> None:
    """With the prompts' position from before the step, which is repeated."""
    run, save = mock.Mock(), mock.Mock()
    run.state.step, run.state.saved = 4, saved
    run.queue.prompts.state_dict.return_value = {"position": 7}
    monkeypatch.setattr(training, "save", save)
    with pytest.raises(StopRequested), resumable(run, {}):
        raise StopRequested("now")
    assert save.mock_calls == [mock.call(run, wait=True, cursor={"position": 7})] * times
