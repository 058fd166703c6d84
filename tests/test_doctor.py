"""The command line where packages are missing, as they are for a newcomer: a line, and no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fake_vllm import FakeVLLM
from launch import REPO
from megatron_fspo import cli
from megatron_fspo.cli import doctor, node

PACKAGES = tuple(doctor._MODULES[""])


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    """Python without its site-packages."""
    program = [sys.executable, "-S", "-m", "megatron_fspo", *words]
    return subprocess.run(program, env={"PYTHONPATH": str(REPO)}, capture_output=True, text=True)


def test_help_needs_no_package() -> None:
    done = bare("--help")
    assert (done.returncode, done.stderr) == (0, "") and "explain" in done.stdout


@pytest.mark.parametrize("words", ["train --help", "train --config run.toml"])
def test_a_command_without_its_packages_is_one_line(words: str) -> None:
    done = bare(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"megatron-fspo: this needs the Python package [^\n]+\n", done.stderr)
    assert "`pip install -e .`" in done.stderr and "`megatron-fspo doctor`" in done.stderr


def test_what_is_missing_is_named() -> None:
    done = bare("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    _, _, listed = done.stdout.partition("missing for any run")
    assert re.findall(r"^  - ([\w-]+)$", listed, re.MULTILINE) == [*PACKAGES]
    assert json.loads(bare("doctor", "--json").stdout)["required"] == [*PACKAGES]


def test_another_nccl_in_the_environment_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVLLM(tmp_path)
    monkeypatch.setenv("VLLM_BIN", str(vllm.program))
    assert doctor.nccl_problems("2.29.7") == [], "no vLLM here"
    vllm.write(nccl="2.29.3")
    assert doctor.nccl_problems("2.29.3") == []
    (line,) = doctor.nccl_problems("2.29.7")
    assert "2.29.7 here" in line and "2.29.3 with " in line
    vllm.write()
    assert doctor.nccl_problems("2.29.7") == [], "a torch for CPUs"


NODE = """
import os, resource
from pathlib import Path
from megatron_fspo.cli import node
{made}
print(*node.node_problems(2, None), sep="\\n")
"""
NO_DRIVER = "NVIDIA driver: none on this node; CUDA 13 needs 580 or newer"


def on_a_node(made: str = "", *before: str) -> list[str]:
    """What is wrong with a node where this has been made so."""
    done = subprocess.run(
        [*before, sys.executable, "-c", NODE.format(made=made)], cwd=REPO, capture_output=True, text=True
    )
    if before and "Operation not permitted" in done.stderr:
        pytest.skip("needs root")
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


def missing(lines: list[str], start: str) -> str:
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def test_limits_cores_and_shared_memory_of_a_node_that_are_too_small() -> None:
    lowered = "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))"
    line = missing(on_a_node(lowered), "open files")
    assert "4096 at most (ulimit -Hn)" in line and "--ulimit nofile=16384" in line
    assert not [line for line in on_a_node() if line.startswith("locked memory")], "no InfiniBand here"
    lowered = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 1 << 16)); node._INFINIBAND = Path('/')"
    assert "64 KiB at most (ulimit -Hl)" in missing(on_a_node(lowered), "locked memory")
    line = missing(on_a_node("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"), "cores")
    assert "cores: 1 for 2 ranks" in line and "--cpu-bind=none" in line


def test_a_driver_that_is_old_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not node._VERSION.exists():
        assert NO_DRIVER in on_a_node()
    file = tmp_path / "version"
    monkeypatch.setattr(node, "_VERSION", file)
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (root@builder)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    for cuda in (None, "13.0"):
        assert "NVIDIA driver 575.57.08: CUDA 13 needs 580" in "\n".join(node.node_problems(1, cuda))
    assert "driver" not in "\n".join(node.node_problems(1, "12.8"))
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 2025\n")
    assert "driver" not in "\n".join(node.node_problems(1, "13.0"))


def test_doctor_says_all_of_it() -> None:
    """In a mount namespace with Docker's shared memory, on one core, with few files."""
    small = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm; ulimit -n 256; "
        f'exec taskset -c {min(os.sched_getaffinity(0))} "$@"'
    )
    words = ["unshare", "--mount", "bash", "-ec", small, "-"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("needs root")
    done = subprocess.run(
        [*words, sys.executable, "-m", "megatron_fspo", "doctor", "--json"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = json.loads(done.stdout)["missing"]
    assert "256 at most" in missing(lines, "open files")
    assert "1 for 1 ranks, which need 2 each" in missing(lines, "cores")
    assert "/dev/shm has 64 MiB" in missing(lines, "shared memory") and "docker run --shm-size" in str(lines)
    assert node._VERSION.exists() or lines[0] == NO_DRIVER


def test_the_list_is_that_of_the_package() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, modules in doctor._MODULES.items():
        names = {re.match(r"[\w-]+", line)[0] for line in lists[extra]}  # type: ignore[index]
        assert set(modules) == names - {"megatron-fspo"}
        assert doctor.absent(extra) == []


@pytest.mark.parametrize(("name", "told"), [("megatron.core", True), ("jinja2", True), ("mine", False)])
def test_only_a_package_of_ours_is_told_so(
    name: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(words: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(cli, "_main", main)
    if told:
        assert cli.main(["train"]) == 2
        line = capsys.readouterr().err
        assert name.partition(".")[0] in line and ("pip install -e '.[lab]'" in line) == (name == "jinja2")
    else:
        with pytest.raises(ModuleNotFoundError, match="mine"):
            cli.main(["train"])
