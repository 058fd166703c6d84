"""The benchmarks as a user starts them: from the root of a clone, with nothing on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch import REPO

SCRIPTS = sorted(
    path.name for path in (REPO / "benchmarks").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)


def test_all_scripts_are_found() -> None:
    assert {"convert.py", "evidence.py", "logprob_head.py"} <= set(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_starts_from_the_root(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, f"benchmarks/{script}", "--help"]
    shown = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: {script}")
