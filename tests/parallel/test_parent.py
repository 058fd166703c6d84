"""A process that ends with its parent, and one that does not care for it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from launch import environment
from megatron_fspo.mcore.machine import startup

ENDS = "from megatron_fspo.job.parent import end_with_parent; end_with_parent()"
REST = "; import sys, time; print('ready', flush=True); time.sleep(float(sys.argv[1]))"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize(("program", "ends"), [(ENDS, True), ("pass", False)])
def test_a_process_whose_parent_is_killed(program: str, ends: bool) -> None:
    seconds = 120.0 if ends else 3.0
    words = [sys.executable, "-c", PARENT, program + REST, str(seconds)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        began = time.monotonic()
        parent.kill()
        assert parent.stdout.read() == b""  # the child holds the other end until it ends
    assert (time.monotonic() - began < 60) if ends else (time.monotonic() - began > 1)


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_ends_with_the_agent_of_torchrun_and_no_other_parent(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[bool] = []
    monkeypatch.setattr(startup, "end_with_parent", lambda: bound.append(True))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with startup.job():
        assert bound == [True] * launched
