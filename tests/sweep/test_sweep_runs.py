"""A sweep through the real command: runs, a match, a failure that stops no other, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from launch import REPO, environment
from megatron_fspo.cli import main

pytestmark = pytest.mark.slow

TINY = {
    "run": {"steps": 1},
    "parallel": {"tensor": 1, "sequence": False},
    "rollout": {"prompts": 8, "samples": 4},
    "batch": {"mini_batches": 2, "epochs": 1},
    "evaluation": {"every": 0},
    "loss": {"calibrate": 0},
}


def write_sweep(folder: Path, **more: object) -> Path:
    tree = {"config": ["examples/make_sum/run.toml"], "folder": str(folder / "runs"), "jobs": 2, "keys": TINY}
    file = folder / "sweep.toml"
    file.write_text(tomli_w.dumps({**tree, **more}), encoding="utf-8")
    return file


def command(file: Path, *words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "megatron_fspo", "sweep", str(file), *words]


def sweep(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(file, *words), cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300
    )


def test_runs_are_matched_made_once_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    broken = {"rollout": {"prompts": 400}}  # more than there are: seen once its rank has read the data
    arms = {"fspo": {"loss": {"c_low": 0.01, "c_high": 0.01}}, "rloo": {"loss": {"name": "rloo"}}}
    file = write_sweep(tmp_path, match="fspo", arms={**arms, "broken": broken})
    done = sweep(file)
    assert done.returncode == 1, done.stderr
    assert "1 of 3 runs failed: broken-1: exit status 2: megatron-fspo: " in done.stderr
    assert "[2/3]" in done.stdout and "[3/3]" not in done.stdout
    made = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/metrics.jsonl")}
    assert made.keys() == {"fspo-1", "rloo-1"}

    whole = write_sweep(tmp_path, match="fspo", arms=arms)
    assert main(["sweep", str(whole)]) == 0
    said = capsys.readouterr().out
    assert said.count("is there already") == 2 and "rloo less fspo" in said
    found = json.loads((tmp_path / "runs/summary.json").read_text())
    share = {run["arm"]: run["out_of_band"] for run in found["runs"]}
    # One rollout, the same for both, so all but the second update's gradient: a sequence or two apart.
    assert 0.02 < share["fspo"] < 0.98 and abs(share["rloo"] - share["fspo"]) < 0.15

    assert main(["sweep", str(whole), "--optimizer.lr", "1e-3"]) == 2
    assert "was made with other keys (optimizer.lr: 0.0001 -> 0.001)" in capsys.readouterr().err


def test_a_sweep_that_is_stopped_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    file = write_sweep(tmp_path, jobs=1, arms={"fspo": {"run": {"steps": 2}}})
    process = subprocess.Popen(
        command(file), cwd=REPO, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    first = tmp_path / "runs/fspo-1/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (first.exists() and first.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no run of it is left
    done = sweep(file)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "runs/summary.json").read_text())["runs"]) == 1
