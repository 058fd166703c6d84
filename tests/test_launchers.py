"""What starts torchrun gives ranks the time to save after SIGTERM: its own 30 s are less than many a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from launch import REPO, environment
from megatron_fspo.cli import main

SCRIPT = "examples/run_fspo_qwen3_8b.sh"
NAME = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class Started(BaseException):
    """In place of this process becoming another."""


@pytest.mark.parametrize(("given", "seconds"), [(None, 1800), ("90", 90)])
def test_nproc(given: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def execv(program: str, words: list[str]) -> None:
        assert program == words[0] == sys.executable and words[1:3] == ["-m", "torch.distributed.run"]
        raise Started(words[3:])

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", NAME):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(NAME, given)
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(os, "execv", execv)
    config = ["--config", "examples/make_sum/run.toml", "--run.folder", str(tmp_path)]
    with pytest.raises(Started) as caught:
        main(["train", *config, "--nproc", "2"])
    launched = parse_args(caught.value.args[0])
    assert launched.shutdown_timeout == seconds
    assert launched.training_script == "megatron_fspo" and launched.training_script_args == ["train", *config]


@pytest.mark.parametrize(("given", "seconds"), [(None, 1800), ("90", 90)])
def test_the_script(given: str | None, seconds: int, tmp_path: Path) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {log}\n')
    python.chmod(0o755)
    env = environment(PYTHON=str(python), NPROC="4")
    env.pop(NAME, None)
    if given is not None:
        env[NAME] = given
    subprocess.run(["bash", SCRIPT, "--run.steps", "3"], cwd=REPO, env=env, check=True)
    words = log.read_text().splitlines()
    assert words[:2] == ["-m", "torch.distributed.run"]
    launched = parse_args(words[2:])
    assert launched.shutdown_timeout == seconds and launched.nproc_per_node == "4"
    assert launched.training_script == SCRIPT and launched.training_script_args == ["--run.steps", "3"]
