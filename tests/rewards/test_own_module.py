"""A reward's module in the working directory is found, whatever starts the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import REPO, environment, torchrun
from megatron_fspo.errors import InputError
from megatron_fspo.rewards import get_reward

PROGRAM = (
    "from megatron_fspo.rewards import get_reward\nprint(get_reward('my_rewards:fn')(None, None, 'abc'))\n"
)
MAKE_SUM = REPO / "examples/make_sum"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory, with a module; what is started lies in another one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/program.py").write_text(PROGRAM)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/my_rewards.py").write_text(
        "def fn(prompt, completion, response):\n    return float(len(response))\n"
    )
    return tmp_path / "work"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["../bin/program.py"], id="console-script"),  # has its own folder on the path
        pytest.param(["-m", "program"], id="module"),
        pytest.param(["-P", "-m", "program"], id="safe-path"),
    ],
)
def test_a_module_in_the_working_directory(folder: Path, words: list[str]) -> None:
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{folder.parent / 'bin'}"
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


@pytest.mark.slow
def test_torchrun_from_another_folder(folder: Path) -> None:
    words = ["--config", f"{MAKE_SUM}/run.toml", "--model.checkpoint", f"{MAKE_SUM}/checkpoint"]
    words += ["--data.train", f"{MAKE_SUM}/train.jsonl", "--data.validation", f"{MAKE_SUM}/validation.jsonl"]
    words += ["--parallel.tensor", "1", "--parallel.sequence", "false", "--model.backend", "cpu"]
    words += ["--reward.name", "my_rewards:fn"]
    done = torchrun(["-m", "megatron_fspo", "train", *words, "--check"], nproc=1, cwd=folder)
    assert done.returncode == 0 and "fine; the run would be in" in done.stdout, done.stderr


def test_one_that_is_not_there_is_told_with_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError) as caught:
        get_reward("no_rewards_for_test:fn")
    assert str(caught.value).endswith(
        f"No module named 'no_rewards_for_test' in {folder} or among what is installed"
    )
