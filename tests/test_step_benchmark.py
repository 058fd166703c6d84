"""What docs/performance.md says of a step without its model; and that the benchmark still runs a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import step_overhead
from launch import REPO, environment

REPORT = json.loads((REPO / "benchmarks/results/step_overhead.json").read_text(encoding="utf-8"))
PAGE = (REPO / "docs/performance.md").read_text(encoding="utf-8")


def test_the_page_has_the_figures_of_the_report() -> None:
    assert REPORT["command"] in PAGE
    assert step_overhead.summary(REPORT) in PAGE
    assert step_overhead.phases(REPORT) in PAGE
    assert step_overhead.at_full_size(REPORT) in PAGE
    assert step_overhead.of_saves(REPORT) in PAGE


def test_a_fifth_of_the_time_and_a_quarter_of_the_memory() -> None:
    for run in REPORT["steps"]:
        for name in ("cpu_seconds_busiest_rank", "cpu_seconds_all_ranks"):
            assert run["before"][name] >= 5 * run["after"][name]
        for name in ("memory_first_rank", "memory_other_ranks"):
            assert run["before"][name] >= 4 * run["after"][name]


@pytest.mark.slow
def test_a_small_step_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = ["benchmarks/step_rank.py", "--code", "after", "--package", str(REPO), "--out", str(out)]
    small = ["--responses", "64", "--tokens", "64", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, *command, *small], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert all(found["phases"][name] > 0 for name in ("read", *step_overhead.PHASES))
