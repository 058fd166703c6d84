"""A mixture of experts learns make-sum, two experts on each rank; and goes on in another layout."""

from __future__ import annotations

import shutil
import statistics
import sys
from pathlib import Path

import pytest

from launch import REPO, forked, why
from runs import CONFIG, PROGRAM, numbers, rows

sys.path.insert(0, str(CONFIG.parent))

import check_export
import make_experts

pytestmark = pytest.mark.slow

LAST = 10


def train(folder: Path, name: str, *extra: str) -> None:
    words = ["train", "--config", str(CONFIG), "--config", str(CONFIG.parent / "moe.toml")]
    words += ["--run.folder", str(folder), "--run.name", name, "--checkpoint.every", str(LAST - 1)]
    words += ["--model.checkpoint", str(folder / "checkpoint"), *extra]
    done = forked([*PROGRAM, *words], nproc=2, cwd=REPO)
    assert done.returncode == 0, why(done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    make_experts.main(folder / "checkpoint")
    train(folder, "ep2")
    return folder


def test_it_learns(folder: Path) -> None:
    steps = [row for row in rows(folder, "ep2") if "critic/rewards/mean" in row]
    assert [row["step"] for row in steps] == [*range(1, LAST + 1)]
    rewards = [row["critic/rewards/mean"] for row in steps]
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:2]) + 0.05, rewards
    # The pass for old log-probs took the same experts, to the bit.
    assert {row["fspo/on_policy_abs_s_max"] for row in steps} == {0.0}
    assert max(row["rollout/logprob_abs_diff/mean"] for row in steps) < 1e-5


def test_transformers_scores_the_export_as_the_trainer_does(folder: Path) -> None:
    difference, tokens = check_export.largest_difference(folder / "ep2")
    assert difference < 1e-4 and tokens > 100


def test_it_goes_on_without_expert_parallel(folder: Path) -> None:
    """The last step from the checkpoint before it, under tensor parallel and the distributed optimizer."""
    shutil.copytree(folder / "ep2", folder / "tp2")
    shutil.rmtree(folder / f"tp2/checkpoints/step_{LAST:06d}")
    shutil.rmtree(folder / "tp2/hf")
    layout = "--parallel.expert 1 --parallel.tensor 2 --parallel.sequence true"
    train(folder, "tp2", "--resume", *layout.split(), "--parallel.distributed-optimizer", "true")
    got, want = (numbers(rows(folder, name)[-1]) for name in ("tp2", "ep2"))
    assert got.keys() == want.keys() and got["step"] == LAST
    for metric in (
        "critic/rewards/mean",
        "response_length/mean",
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/entropy",
    ):
        assert got[metric] == pytest.approx(want[metric], rel=2e-3, abs=2e-5), metric
