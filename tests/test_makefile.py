"""Environments that the Makefile makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launch import REPO

PYTHON = ["PYTHON=echo", "PYTHON312=echo", "PYTHON_VLLM=echo"]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    "name", [".venv", ".venv312", ".venv-te", ".venv-trl", ".venv-skyrl", ".venv-verifiers"]
)
def test_an_environment_is_never_made_through_a_link(name: str, linked: bool, tmp_path: Path) -> None:
    """It would be emptied first, and another checkout uses it."""
    for path in (REPO / "Makefile", REPO / "pyproject.toml", *REPO.glob("[cr]*s*.txt")):
        shutil.copy(path, tmp_path)
    (tmp_path / "theirs").mkdir()
    if name == ".venv-te":  # which is made by the Python of the other
        program = tmp_path / ".venv/bin/python"
        program.parent.mkdir(parents=True)
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
        for done in (".run", ".ready"):
            (tmp_path / ".venv" / done).touch()
    if linked:
        (tmp_path / name).symlink_to("theirs")
    target = f"{name}/.run" if name == ".venv" else f"{name}/.ready"
    made = subprocess.run(["make", target, *PYTHON], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 2, "echo makes no environment"
    assert (f"-m venv --clear {name}\n" in made.stdout) is not linked
