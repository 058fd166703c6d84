"""A reward's module in the working directory is found, whatever starts the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import environment

PROGRAM = "from megatron_fspo.rewards import get_reward\nprint(get_reward('my_rewards:fn')(0, 0, 'abc'))\n"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["../bin/program.py"], id="console-script"),  # has its own folder on the path
        pytest.param(["-m", "program"], id="module"),
        pytest.param(["-P", "-m", "program"], id="safe-path"),
    ],
)
def test_a_module_in_the_working_directory(tmp_path: Path, words: list[str]) -> None:
    for name in ("bin", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/program.py").write_text(PROGRAM)
    (tmp_path / "work/my_rewards.py").write_text("def fn(a, b, response):\n    return float(len(response))\n")
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path / 'bin'}"
    program = [sys.executable, *words]
    done = subprocess.run(program, cwd=tmp_path / "work", env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr
