"""A process that ends with its parent, and one that does not care for it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from launch import environment

CHILD = """
import sys, time
from megatron_fspo.parent import end_with_parent
if sys.argv[1] == "ends":
    end_with_parent()
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize(("word", "seconds"), [("ends", 120.0), ("stays", 3.0)])
def test_a_process_whose_parent_is_killed(word: str, seconds: float) -> None:
    words = [sys.executable, "-c", PARENT, CHILD, word, str(seconds)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        began = time.monotonic()
        parent.kill()
        assert parent.stdout.read() == b""  # the child holds the other end until it ends
    assert (time.monotonic() - began < 60) if word == "ends" else (time.monotonic() - began > 1)
