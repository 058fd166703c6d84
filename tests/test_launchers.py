"""Launchers give ranks the time to save after SIGTERM: torchrun's own 30 s are less than many a step."""

from __future__ import annotations

import os
import runpy
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
    """Raised where this process would become another."""


@pytest.mark.parametrize("command", ["train", "calibrate", "evaluate", "verify"])
@pytest.mark.parametrize(("given", "seconds"), [(None, 1800), ("90", 90)])
def test_nproc(
    command: str, given: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def execv(program: str, words: list[str]) -> None:
        assert program == words[0] == sys.executable and words[1:3] == ["-m", "megatron_fspo.cli.launch"]
        raise Started(words[3:])

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", NAME):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(NAME, given)
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(os, "execv", execv)
    words = [command, "--config", "examples/make_sum/run.toml"]
    if command != "verify":
        words += ["--run.folder", str(tmp_path)]
    with pytest.raises(Started) as caught:
        main([*words, "--nproc", "2"])
    launched = parse_args(caught.value.args[0])
    assert launched.shutdown_timeout == seconds
    assert launched.training_script == "megatron_fspo" and launched.training_script_args == words


def start_script(
    folder: Path, *words: str, script: str = SCRIPT, **given: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with an interpreter that writes its arguments to ``log``, a line per call."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {folder / "log"}\n')
    python.chmod(0o755)
    env = environment(PYTHON=str(python), **given)
    for name in {NAME, "NUMA", "VERB", "NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} - set(
        given
    ):
        env.pop(name, None)
    return subprocess.run(["bash", script, *words], cwd=REPO, env=env, capture_output=True, text=True)


def calls(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


@pytest.mark.parametrize(("given", "seconds"), [({}, 1800), ({NAME: "90"}, 90)])
def test_the_script(given: dict[str, str], seconds: int, tmp_path: Path) -> None:
    start_script(tmp_path, "--run.steps", "3", NPROC="4", **given).check_returncode()
    check, words = calls(tmp_path)
    assert check == [SCRIPT, "--check", "--run.steps", "3"]
    assert words[:2] == ["-m", "megatron_fspo.cli.launch"]
    launched = parse_args(words[2:])
    assert launched.rdzv_endpoint == "127.0.0.1:0" and launched.max_restarts == 0
    assert launched.shutdown_timeout == seconds and launched.nproc_per_node == "4"
    assert launched.training_script == SCRIPT and launched.training_script_args == ["--run.steps", "3"]
    assert launched.numa_binding is None


def test_the_script_binds_ranks_and_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_script(tmp_path, "--smoke", NUMA="node", VERB="verify").check_returncode()
    (words,) = calls(tmp_path)  # verify has no --check
    launched = parse_args(words[2:])
    assert launched.numa_binding == "node" and launched.training_script_args == ["--smoke"]
    arguments = runpy.run_path(str(REPO / SCRIPT))["arguments"]
    assert arguments([])[0] == "train"
    monkeypatch.setenv("VERB", "verify")
    assert arguments([])[0] == "verify"


@pytest.mark.parametrize(("node", "host"), [("0", "true"), ("1", "false")])
def test_the_script_on_one_of_two_nodes(node: str, host: str, tmp_path: Path) -> None:
    given = {"NNODES": "1:2", "NODE_RANK": node, "MASTER_ADDR": "node-a", "MAX_RESTARTS": "3"}
    start_script(tmp_path, "--resume", "auto", **given).check_returncode()
    *checks, words = calls(tmp_path)
    assert len(checks) == (node == "0"), "the first has begun to write, perhaps, when another comes"
    launched = parse_args(words[2:])
    assert (launched.nnodes, launched.nproc_per_node, launched.max_restarts) == ("1:2", "8", 3)
    assert launched.rdzv_endpoint == "node-a:29500"
    assert launched.rdzv_conf == f"is_host={host}"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "node-a"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR"),
        ({"MAX_RESTARTS": "1"}, "--resume auto"),
        ({"NNODES": "1:2", "NODE_RANK": "1", "MASTER_ADDR": "node-a"}, "--resume auto"),
    ],
)
def test_what_the_script_lacks_is_named(given: dict[str, str], name: str, tmp_path: Path) -> None:
    done = start_script(tmp_path, **given)
    assert done.returncode != 0 and not (tmp_path / "log").exists()
    assert name in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_other_models_script_is_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = str(REPO / "examples/run_fspo_qwen3_1_7b.sh")
    layer = ["--config", str(REPO / "examples/qwen3_1_7b/run.toml")]
    start_script(tmp_path, "--run.steps", "3", script=other, NPROC="4").check_returncode()
    launched = parse_args(calls(tmp_path)[-1][2:])
    assert launched.training_script == str(REPO / SCRIPT) and launched.nproc_per_node == "4"
    assert launched.training_script_args == [*layer, "--run.steps", "3"]

    found: list[list[str]] = []
    monkeypatch.setattr("megatron_fspo.cli.main", found.append)
    monkeypatch.setattr(sys, "argv", [other, "--run.steps", "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(other, run_name="__main__")
    base = ["--config", str(REPO / "examples/qwen3_8b/run.toml")]
    assert found == [["train", *base, *layer, "--run.steps", "3"]]
