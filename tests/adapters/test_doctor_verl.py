"""``megatron-fspo doctor verl``, where verl is installed and where it is not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "megatron_fspo", "doctor", "verl", *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make test-adapters`")
def test_verl_has_found_the_loss() -> None:
    done = doctor()
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "verl has the policy loss fspo"), (
        done.stderr
    )


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make test-adapters`")
def test_a_plugin_that_verl_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "another")
    done = doctor("--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and found["registered"] is False
    assert found["problem"] == "VERL_USE_EXTERNAL_PLUGINS=another excludes megatron_fspo"


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_without_verl_it_says_so() -> None:
    done = doctor()
    assert done.returncode == 1
    assert done.stdout == "verl has no policy loss fspo: verl is not installed in this environment\n"
