"""A process that ends with its parent, and one that does not care for it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from launch import environment

ENDS = "from megatron_fspo.job.parent import end_with_parent; end_with_parent()"
RANK = "from megatron_fspo.mcore.startup import job; job().__enter__()"
REST = "; import sys, time; print('ready', flush=True); time.sleep(float(sys.argv[1]))"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize(
    ("program", "launcher", "ends"),
    [
        (ENDS, "", True),
        ("pass", "", False),
        pytest.param(RANK, "torchrun", True, marks=pytest.mark.slow),
        pytest.param(RANK, "", False, marks=pytest.mark.slow),
    ],
)
def test_a_process_whose_parent_is_killed(program: str, launcher: str, ends: bool) -> None:
    """A rank ends with the agent of torchrun, and with no other parent."""
    seconds = 120.0 if ends else 3.0
    words = [sys.executable, "-c", PARENT, program + REST, str(seconds)]
    env = environment(**({"TORCHELASTIC_RUN_ID": "one"} if launcher else {}))
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        began = time.monotonic()
        parent.kill()
        assert parent.stdout.read() == b""  # the child holds the other end until it ends
    assert (time.monotonic() - began < 60) if ends else (time.monotonic() - began > 1)
