"""A mixture of experts learns make-sum, two experts on each rank; and goes on in another layout."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch import forked, why
from runs import CONFIG, PROGRAM, numbers, rows

sys.path.insert(0, str(CONFIG.parent))

import check_export
import make_experts

pytestmark = pytest.mark.slow

LAST = 10
NOISE = ("perf/", "timing_s/", "rollout/", "fspo/lre", "fspo/sigma_hat", "fspo/exponent")
"""Metrics that measure rounding, or time."""
REPLAY = "--moe.replay old_pass --moe.aux-loss-coef 0.01 --moe.z-loss-coef 0.001".split()


def train(folder: Path, name: str, *extra: str, nproc: int = 2) -> None:
    words = ["train", "--config", str(CONFIG), "--config", str(CONFIG.parent / "moe.toml")]
    words += ["--run.folder", str(folder), "--run.name", name, "--checkpoint.every", str(LAST - 1)]
    words += ["--model.checkpoint", str(folder / "checkpoint"), *extra]
    done = forked([*PROGRAM, *words], nproc=nproc, **{"DRAW_REPORT": "1"} if name == "ep2" else {})
    assert done.returncode == 0, why(done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    make_experts.main(folder / "checkpoint")
    train(folder, "ep2", *REPLAY)
    return folder


def test_it_learns(folder: Path) -> None:
    steps = [row for row in rows(folder, "ep2") if "critic/rewards/mean" in row]
    assert [row["step"] for row in steps] == [*range(1, LAST + 1)]
    rewards = [row["critic/rewards/mean"] for row in steps]
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:2]) + 0.05, rewards
    # The pass for old log-probs took the same experts, to the bit.
    assert {row["fspo/on_policy_abs_s_max"] for row in steps} == {0.0}
    assert max(row["rollout/logprob_abs_diff/mean"] for row in steps) < 1e-5
    # 4 experts, 2 for each token: at most twice the mean. An even load has an auxiliary loss of 1.
    for row in steps:
        assert 1 <= row["router/load_max/mean"] <= row["router/load_max"] <= 2
        assert 1 <= row["router/aux_loss"] < 2 and row["router/z_loss"] > 0 == row["router/idle"]
        assert 0 < row["router/entropy"] <= math.log(4) and 0 < row["actor/route_flips"] < 0.2
        assert row["rollout/route_flips"] is None, "no sampler has told its routes"
    loads = [json.loads(line)["load"] for line in (folder / "ep2/routers.jsonl").read_text().splitlines()]
    assert len(loads) == LAST and {sum(layer) for layer in loads[0]} == {sum(loads[0][0])}


def test_transformers_scores_the_export_as_the_trainer_does(folder: Path) -> None:
    difference, tokens = check_export.largest_difference(folder / "ep2")
    assert difference < 1e-4 and tokens > 100


def test_it_goes_on_without_expert_parallel(folder: Path) -> None:
    """The last step from the checkpoint before it, under tensor parallel and the distributed optimizer."""
    shutil.copytree(folder / "ep2", folder / "tp2")
    shutil.rmtree(folder / f"tp2/checkpoints/step_{LAST:06d}")
    shutil.rmtree(folder / "tp2/hf")
    layout = "--parallel.expert 1 --parallel.tensor 2 --parallel.sequence true"
    train(folder, "tp2", "--resume", *REPLAY, *layout.split(), "--parallel.distributed-optimizer", "true")
    got, want = (numbers(rows(folder, name)[-1]) for name in ("tp2", "ep2"))
    assert got.keys() == want.keys() and got["step"] == LAST
    for metric in (
        "critic/rewards/mean",
        "response_length/mean",
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/entropy",
        "router/entropy",
        "router/aux_loss",
    ):
        assert got[metric] == pytest.approx(want[metric], rel=2e-3, abs=2e-5), metric


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "nproc", "layout"),
    [
        ("ep1", 1, "--parallel.expert 1"),
        ("ep2-tp2", 4, "--parallel.tensor 2 --parallel.sequence true"),
        ("ep2-pp2", 4, "--parallel.pipeline 2"),
    ],
)
def test_rows_responses_and_export_are_those_of_other_layouts(
    folder: Path, name: str, nproc: int, layout: str
) -> None:
    short = [*"--run.steps 2 --evaluation.every 2 --evaluation.samples 2".split(), *REPLAY]
    if not (folder / "short").exists():
        train(folder, "short", *short)
    train(folder, name, *short, *layout.split(), nproc=nproc)
    for got, want in zip(rows(folder, name), rows(folder, "short"), strict=True):
        a, b = numbers(got), numbers(want)
        assert a.keys() == b.keys()
        both = {key: (a[key], b[key]) for key in b if not key.startswith(NOISE) and b[key] is not None}
        assert {k: v for k, v in both.items() if not math.isclose(*v, rel_tol=2e-3, abs_tol=5e-5)} == {}
        assert a.get("fspo/on_policy_abs_s_max", 0.0) == 0.0
    samples = [(folder / run / "samples.jsonl").read_text().splitlines() for run in (name, "short")]
    got_ids, want_ids = ([json.loads(line)["token_ids"] for line in lines] for lines in samples)
    assert got_ids == want_ids
    exports = [load_file(folder / run / "hf/model.safetensors") for run in (name, "short")]
    assert exports[0].keys() == exports[1].keys()
    assert max((exports[0][key] - exports[1][key]).abs().max().item() for key in exports[0]) < 2e-5
