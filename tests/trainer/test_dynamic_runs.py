"""Dynamic sampling in whole runs: what they learn from on two ranks, and what a resume gives."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynamic_worker import BATCHES
from launch import forked, why
from metrics_page import unknown
from runs import numbers, rows

pytestmark = pytest.mark.slow

STEPS = 3
WORKER = Path(__file__).with_name("dynamic_worker.py")
DATA_PARALLEL = ("--parallel.tensor", "1", "--parallel.sequence", "false")
# Three responses to a prompt: about half of the groups have no spread.
COMMON = ("--evaluation.every", "0", "--rollout.samples", "3", "--rollout.dynamic-sampling", "true")


def train(
    folder: Path, name: str, *extra: str, steps: int = STEPS, die_in_step: int = 0, nproc: int = 2
) -> subprocess.CompletedProcess[str]:
    options = ("--run.steps", str(steps), "--checkpoint.every", "1", *COMMON, *DATA_PARALLEL, *extra)
    return forked([str(WORKER), str(folder), name, str(die_in_step), *options], nproc=nproc)


def batches(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / BATCHES).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``: an uninterrupted run."""
    folder = tmp_path_factory.mktemp("dynamic")
    result = train(folder, "whole")
    assert result.returncode == 0, why(result.stderr)
    assert "no spread" not in result.stdout
    return folder


def test_every_group_of_every_batch_has_spread(folder: Path) -> None:
    found = batches(folder, "whole")
    assert len(found) == STEPS
    for batch in found:
        assert len(batch["prompts"]) == 8 and len(batch["rewards"]) == 24
        for group in batch["advantages"]:
            assert any(group) and sum(group) == pytest.approx(0, abs=1e-9)
        assert not any(len(set(batch["rewards"][first : first + 3])) == 1 for first in range(0, 24, 3))


def test_responses_stay_with_the_rank_that_sampled_them(folder: Path) -> None:
    owners = set()
    for batch in batches(folder, "whole"):
        assert batch["holders"] == [[owner] for owner in batch["owner"]]
        assert [number for number, _ in batch["tokens"]] == list(range(24))
        assert [len(tokens) for _, tokens in batch["tokens"]] == batch["lengths"]
        owners.add(tuple(batch["owner"][::3]))
    assert any(owner != tuple(i % 2 for i in range(8)) for owner in owners)  # by no rule of places


def test_metrics_count_what_was_sampled(folder: Path) -> None:
    metrics = rows(folder, "whole")
    assert any(row["rollout/dynamic/rounds"] > 1 for row in metrics)
    for row, batch in zip(metrics, batches(folder, "whole"), strict=True):
        dynamic = {
            key.removeprefix("rollout/dynamic/"): value
            for key, value in row.items()
            if key.startswith("rollout/dynamic/")
        }
        assert dynamic["unfilled"] == 0
        assert dynamic["prompts_sampled"] == 8 + dynamic["groups_dropped"] + dynamic["groups_surplus"]
        share = dynamic["groups_dropped"] / dynamic["prompts_sampled"]
        assert row["critic/no_spread"] == pytest.approx(share)
        assert dynamic["batch_rewards/mean"] == pytest.approx(sum(batch["rewards"]) / 24)
        assert dynamic["batch_response_length/mean"] == pytest.approx(sum(batch["lengths"]) / 24)
        assert row["actor/grad_norm"] > 0
        assert unknown(row) == []
    # Of all responses, so that the filter does not move them.
    assert all(row["critic/rewards/mean"] != row["rollout/dynamic/batch_rewards/mean"] for row in metrics)


def test_a_run_that_dies_between_rounds_resumes_with_the_same_numbers(folder: Path) -> None:
    died = train(folder, "died", die_in_step=2)
    assert died.returncode != 0 and [row["step"] for row in rows(folder, "died")] == [1], died.stderr
    resumed = train(folder, "died", "--resume")
    assert resumed.returncode == 0, why(resumed.stderr)
    assert batches(folder, "died") == batches(folder, "whole")
    assert list(map(numbers, rows(folder, "died"))) == list(map(numbers, rows(folder, "whole")))
    weights = "hf/model.safetensors"
    assert (folder / "died" / weights).read_bytes() == (folder / "whole" / weights).read_bytes()


def test_a_reward_that_teaches_nothing_ends_no_run(tmp_path: Path) -> None:
    """Nothing is in any pack; one line a step says so. (Other layouts: test_left_out.py.)"""
    never = ("--reward.name", "reward_worker:always_half", "--rollout.max-rounds", "3")
    result = train(tmp_path, "never", *never, steps=2, nproc=1)
    assert result.returncode == 0, why(result.stderr)
    for step in (1, 2):
        line = (
            f"step {step}: 8 of 8 groups have no spread after 3 rounds with 24 prompts (rollout.max_rounds)"
        )
        assert result.stdout.count(line) == 1
    for row, batch in zip(rows(tmp_path, "never"), batches(tmp_path, "never"), strict=True):
        assert row["rollout/dynamic/rounds"] == 3 and row["rollout/dynamic/unfilled"] == 8
        assert row["rollout/dynamic/groups_dropped"] == 16
        assert len(batch["prompts"]) == 8 and row["critic/no_spread"] == 1
        assert row["actor/grad_norm"] == 0 and row["actor/pg_loss"] is None  # NaN
        assert math.isfinite(row["critic/rewards/mean"])
