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


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_runs_are_matched_made_once_and_one_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"rollout": {"prompts": 400}}  # more than there are: seen once its rank has read the data
    arms = {"fspo": {"loss": {"c_low": 1e-3, "c_high": 1e-3}}, "rloo": {"loss": {"name": "rloo"}}}
    file = write_sweep(tmp_path, match="fspo", arms={**arms, "broken": broken})
    assert main(["sweep", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "1 of 3 runs failed: broken-1: exit status 2: megatron-fspo: " in err
    assert "[2/3]" in out and "[3/3]" not in out
    made = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/metrics.jsonl")}
    assert made.keys() == {"fspo-1", "rloo-1"}

    token = {"grpo": {"loss": {"name": "grpo"}}}  # has no band to match
    whole = write_sweep(tmp_path, match="fspo", arms=arms | token, unmatched=["grpo"])
    assert main(["sweep", str(whole)]) == 0
    said = capsys.readouterr().out
    assert said.count("is there already") == 2 and "rloo less fspo" in said
    found = json.loads((tmp_path / "runs/summary.json").read_text())
    share = {run["arm"]: run["clipped"] for run in found["runs"]}
    # One rollout, the same for both, so all but the second update's gradient: a sequence or two apart.
    assert 0.02 < share["fspo"] < 0.98 and abs(share["rloo"] - share["fspo"]) < 0.15

    assert main(["sweep", str(whole), "--optimizer.lr", "1e-3"]) == 2
    assert "was made with other keys (optimizer.lr: 0.0001 -> 0.001)" in capsys.readouterr().err


def test_a_sweep_that_is_stopped_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    file = write_sweep(tmp_path, jobs=1, arms={"fspo": {"run": {"steps": 2}}})
    command = [sys.executable, "-W", "ignore", "-m", "megatron_fspo", "sweep", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
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
    assert main(["sweep", str(file)]) == 0
    assert len(json.loads((tmp_path / "runs/summary.json").read_text())["runs"]) == 1
