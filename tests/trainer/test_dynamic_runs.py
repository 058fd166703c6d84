"""Dynamic sampling in whole runs: what they learn from on two ranks, and what a resume gives."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch import why
from metrics_page import unknown
from runs import faulty, numbers, rows

pytestmark = pytest.mark.slow

STEPS = 3
DATA_PARALLEL = ("--parallel.tensor", "1", "--parallel.sequence", "false")
# Three responses to a prompt: about half of the groups have zero variance.
COMMON = ("--evaluation.every", "0", "--rollout.samples", "3", "--rollout.dynamic-sampling", "true")


def train(folder: Path, name: str, *extra: str, die_in_step: int = 0) -> subprocess.CompletedProcess[str]:
    options = ("--run.steps", str(STEPS), "--checkpoint.every", "1", *COMMON, *DATA_PARALLEL, *extra)
    return faulty(folder, name, ["dynamic", str(folder / f"{name}.jsonl"), str(die_in_step)], *options)


def batches(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``: an uninterrupted run."""
    folder = tmp_path_factory.mktemp("dynamic")
    result = train(folder, "whole")
    assert result.returncode == 0, why(result.stderr)
    assert "zero variance" not in result.stdout
    return folder


def test_every_group_of_every_batch_has_variance(folder: Path) -> None:
    found = batches(folder, "whole")
    assert len(found) == STEPS
    for batch in found:
        assert len(batch["prompts"]) == 8 and len(batch["rewards"]) == 24
        for group in batch["advantages"]:
            assert any(group) and sum(group) == pytest.approx(0, abs=1e-9)
        assert not any(len(set(batch["rewards"][first : first + 3])) == 1 for first in range(0, 24, 3))


def test_metrics_count_what_was_sampled(folder: Path) -> None:
    metrics, found = rows(folder, "whole"), batches(folder, "whole")
    assert any(row["rollout/dynamic/rounds"] > 1 for row in metrics)
    for row, batch in zip(metrics, found, strict=True):
        assert row["rollout/dynamic/unfilled"] == 0
        share = row["rollout/dynamic/groups_dropped"] / row["rollout/dynamic/prompts_sampled"]
        assert row["critic/zero_variance_groups"] == pytest.approx(share)
        assert row["rollout/dynamic/batch_rewards/mean"] == pytest.approx(sum(batch["rewards"]) / 24)
        assert row["rollout/dynamic/batch_response_length/mean"] == pytest.approx(sum(batch["lengths"]) / 24)
        # Of all responses, so that the filter does not move it.
        assert row["critic/rewards/mean"] != row["rollout/dynamic/batch_rewards/mean"]
        assert row["actor/grad_norm"] > 0
        assert unknown(row) == []
    # Whoever holds a response, by no rule of places: its tokens come to the pack that they belong to.
    assert any(batch["owner"][::3] != [i % 2 for i in range(8)] for batch in found)
    assert all(row["rollout/logprob_abs_diff/max"] < 1e-4 for row in metrics)


def test_a_run_that_dies_between_rounds_resumes_with_the_same_numbers(folder: Path) -> None:
    died = train(folder, "died", die_in_step=2)
    assert died.returncode != 0 and [row["step"] for row in rows(folder, "died")] == [1], died.stderr
    resumed = train(folder, "died", "--resume")
    assert resumed.returncode == 0, why(resumed.stderr)
    assert batches(folder, "died") == batches(folder, "whole")
    assert list(map(numbers, rows(folder, "died"))) == list(map(numbers, rows(folder, "whole")))
    weights = "hf/model.safetensors"
    assert (folder / "died" / weights).read_bytes() == (folder / "whole" / weights).read_bytes()


def test_a_reward_that_teaches_nothing_is_told_and_ends_the_run_at_last(tmp_path: Path) -> None:
    """In the first step nothing is in any pack. (Other layouts: test_left_out.py.)"""
    never = ("--reward.name", "reward_worker:always_half", "--rollout.max-rounds", "3")
    ended = train(tmp_path, "never", *never, "--reward.max-zero-variance-steps", "2")
    assert ended.returncode == 1
    for step in (1, 2):
        for said in (
            "all 72 rewards are 0.5: nothing to learn from (steps in a row: {step})",
            "8 of 8 groups have zero variance after 3 rounds with 24 prompts (rollout.max_rounds)",
        ):
            assert ended.stdout.count(f"step {step}: {said.format(step=step)}") == 1
    (line,) = ended.stderr.splitlines()
    assert "'reward_worker:always_half': all 72" in line and "zero_variance_steps = 2" in line
    (row,), (batch,) = rows(tmp_path, "never"), batches(tmp_path, "never")
    assert row["rollout/dynamic/rounds"] == 3 and row["rollout/dynamic/unfilled"] == 8
    assert row["rollout/dynamic/groups_dropped"] == 16
    assert len(batch["prompts"]) == 8 and row["critic/zero_variance_groups"] == 1
    assert row["actor/grad_norm"] == 0 and row["actor/pg_loss"] is None  # NaN
    assert math.isfinite(row["critic/rewards/mean"])
