"""The command line where packages are missing, as they are for a newcomer: a line, and no traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fake_vllm import FakeVLLM
from launch import REPO
from megatron_fspo import cli
from megatron_fspo.cli import doctor

PACKAGES = tuple(doctor._MODULES[""])


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    """Python without its site-packages."""
    program = [sys.executable, "-S", "-m", "megatron_fspo", *words]
    return subprocess.run(program, env={"PYTHONPATH": str(REPO)}, capture_output=True, text=True)


@pytest.mark.parametrize("words", ["--help", "train --config run.toml"])
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
