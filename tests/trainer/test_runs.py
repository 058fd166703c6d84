"""The main job, end to end, on real ranks."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from kill_runs import Harness, Kill
from launch import REPO, environment, forked, why
from megatron_fspo.lab.explain.dump import read_dump
from metrics_page import unknown
from runs import PROGRAM, SMALL, faulty, numbers, rows, trained

STEPS = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``: an uninterrupted run of four steps, a checkpoint each, tensor parallel 2.

    It is forked; torchrun starts those that are killed.
    """
    folder = tmp_path_factory.mktemp("runs")
    printed = trained(folder, "whole", "--run.steps", str(STEPS), "--checkpoint.every", "1", DRAW_REPORT="1")
    assert "transformers" in printed and "report" in printed
    return folder


def test_a_run_leaves_what_the_readme_says(folder: Path) -> None:
    whole = folder / "whole"
    names = {path.name for path in whole.iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "hf", "report"} <= names
    assert (whole / "report/index.html").stat().st_size > 10_000
    assert [row["step"] for row in rows(folder, "whole")] == list(range(STEPS + 1))
    assert unknown({name for row in rows(folder, "whole") for name in row}) == []
    resolved = tomllib.loads((whole / "config.toml").read_text())
    assert resolved["optimizer"]["lr"] == 3e-4 and resolved["parallel"]["tensor"] == 2
    # checkpoint.keep: the newest two
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


def test_the_first_update_is_on_policy_and_later_ones_clip(folder: Path) -> None:
    training = [row for row in rows(folder, "whole") if row["step"] > 0]
    # None where no group of the first mini-batch has variance.
    first = [
        row["fspo/on_policy_abs_s_max"] for row in training if row["fspo/on_policy_abs_s_max"] is not None
    ]
    assert first and max(first) < 1e-4
    assert all(row["rollout/logprob_abs_diff/max"] < 1e-4 for row in training)
    assert any(row["actor/pg_clipfrac"] > 0 for row in training)
    assert all(row["actor/grad_norm"] > 0 for row in training)


def test_kept_tokens_add_up_to_the_records(folder: Path) -> None:
    tokens, records = (read_dump(folder / "whole" / name, {}) for name in ("tokens", "sequences.jsonl"))
    assert 8 < len(tokens) < len(records) and tokens.clustered_by == "prompt"
    near = [(records.log_ratio_sum - s).abs().min().item() for s in tokens.log_ratio_sum]
    assert max(near) < 1e-5


def test_c_is_measured_and_changes_slowly(folder: Path) -> None:
    widths = [row["fspo/c_high"] for row in rows(folder, "whole") if row["step"] > 0]
    # Three mini-batches with an S to measure: in the first or the second of these tiny rollouts.
    assert widths[1] != 0.03 and all(after < 1.5 * before for before, after in pairwise(widths[1:]))


def test_transformers_scores_the_export_as_the_trainer_does(folder: Path) -> None:
    script = REPO / "examples/make_sum/check_export.py"
    result = forked([str(script), str(folder / "whole")], nproc=0)
    assert result.returncode == 0, result.stdout + result.stderr


KILLS = [
    Kill(point="update", step=2, count=3, rank=0, victims="rank 1", delay=0.0, asynchronous=False),
    Kill(point="row", step=3, count=1, rank=0, victims="all", delay=0.1, asynchronous=True),
]


def test_killed_and_resumed_is_the_uninterrupted_run(folder: Path) -> None:
    """``python tests/trainer/kill_runs.py`` has many more."""
    harness = Harness(folder, steps=STEPS, every=1, keep=2)
    assert harness.run("killed", KILLS) == []
    assert not harness.problems


def stop_within(folder: Path, name: str, place: str, count: int, *extra: str) -> None:
    """A run that is asked to stop at a moment."""
    stopped = faulty(folder, name, ["stop", place, str(count)], "--run.steps", str(STEPS), *extra)
    assert stopped.returncode != 0 and "stopped by SIGTERM" in stopped.stdout, why(stopped.stderr)


# 32 responses and four optimizer steps a step; 18 more responses are graded by the evaluation before it.
@pytest.mark.parametrize(
    ("place", "count", "every", "done"),
    [("rollout", 60, 10, 1), ("update", 7, 10, 2), ("update", 7, 1, 1)],
)
def test_stopped_within_a_step_and_resumed_gives_the_same_numbers(
    folder: Path, place: str, count: int, every: int, done: int
) -> None:
    """In step 2: it is thrown away where step 1 is saved, or can still be; else it is finished."""
    name = f"{place}-{every}"
    stop_within(folder, name, place, count, "--checkpoint.every", str(every))
    assert [row["step"] for row in rows(folder, name)] == list(range(done + 1))
    assert [path.name for path in (folder / name / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    trained(folder, name, "--run.steps", str(STEPS), "--checkpoint.every", "1", "--resume")
    assert list(map(numbers, rows(folder, name))) == list(map(numbers, rows(folder, "whole")))
    kept = ("sequences.jsonl", "samples.jsonl", "hf/model.safetensors", f"tokens/step_{STEPS:06d}.parquet")
    for file in kept:
        assert (folder / name / file).read_bytes() == (folder / "whole" / file).read_bytes()
    if place == "rollout":
        again = trained(folder, name, "--run.steps", str(STEPS), "--checkpoint.every", "1", "--resume")
        assert "raise run.steps" in again


def test_a_stop_in_the_first_step_leaves_nothing_to_resume(folder: Path) -> None:
    """After its first optimizer step: no checkpoint has these weights."""
    stop_within(folder, "first", "update", 1)
    assert not list((folder / "first/checkpoints").glob("step_*"))


def test_a_run_with_a_nan_sequence_goes_on_and_names_it(tmp_path: Path) -> None:
    result = faulty(
        tmp_path, "few", ["nan_at_the_head"], "--run.steps", "3", "--loss.max-nonfinite-share", "0.2"
    )
    assert result.returncode == 0, why(result.stderr)
    training = [row for row in rows(tmp_path, "few") if row["step"] > 0]
    assert [row["fspo/nonfinite"] for row in training] == [0, 1, 0]
    assert all(math.isfinite(row["actor/grad_norm"]) for row in training)
    assert "step 2: dropped a sequence that is not finite: prompt " in result.stdout


def test_the_launch_script_smokes(tmp_path: Path) -> None:
    """It starts itself by torchrun; its responses are short."""
    words = ["bash", str(REPO / "examples/run_fspo_qwen3_8b.sh"), "--smoke", *SMALL[-2:]]
    env = environment(PYTHON=sys.executable)
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, why(result.stderr)
    assert [row["step"] for row in rows(tmp_path / "runs", "smoke")] == [0, 1, 2]


def test_evaluate_scores_an_exported_checkpoint(folder: Path) -> None:
    arguments = ["evaluate", "--config", str(folder / "whole/config.toml"), "--json"]
    overrides = ["--model.checkpoint", str(folder / "whole/hf")]
    result = forked([*PROGRAM, *arguments, *overrides], nproc=2, timeout=200)
    assert result.returncode == 0, why(result.stderr)
    last = rows(folder, "whole")[-1]
    name = "val/validation/mean@2"
    assert f'"{name}": {last[name]}' in result.stdout
