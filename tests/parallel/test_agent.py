"""A rank whose agent is killed ends; one without an agent does not care for its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import environment

RANK = """
import sys, time
from pathlib import Path
from megatron_fspo.job import agent
agent.POLL_SECONDS = 0.05
agent.end_with_agent()
Path(sys.argv[1]).touch()
time.sleep(float(sys.argv[2]))
"""
AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_rank_whose_parent_is_killed(tmp_path: Path, under_torchrun: bool) -> None:
    ready, errors = tmp_path / "ready", tmp_path / "errors"
    seconds = 120.0 if under_torchrun else 3.0
    env = environment(RANK="3", **({"TORCHELASTIC_RUN_ID": "one"} if under_torchrun else {}))
    reading, writing = os.pipe()  # the rank holds the other end until it ends
    with errors.open("w") as file:
        parent = subprocess.Popen(
            [sys.executable, "-c", AGENT, RANK, str(ready), str(seconds)],
            env=env,
            stdout=writing,
            stderr=file,
            close_fds=True,
        )
    os.close(writing)
    while not ready.exists():
        assert parent.poll() is None
        time.sleep(0.02)
    began = time.monotonic()
    parent.kill()
    parent.wait()
    assert os.read(reading, 1) == b""
    os.close(reading)
    told = errors.read_text()
    if under_torchrun:
        assert time.monotonic() - began < 60
        assert told == f"megatron-fspo: rank 3: torchrun's agent, process {parent.pid}, is gone\n"
    else:
        assert time.monotonic() - began > 1 and told == ""
