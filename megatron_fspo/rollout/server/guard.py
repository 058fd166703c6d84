"""Runs a command and ends all that it started when stdin closes: when the owner ends, however it ends.

    python guard.py GRACE_SECONDS COMMAND...

Only the owner has the other end of stdin. The kernel closes it also after ``kill -9``, which the owner could
not act on. A file of its own without imports of ours: it starts at once and stays small.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time


def main(grace_seconds: float, command: list[str]) -> None:
    """Never returns: the whole process group is killed at last, this process with it."""
    # SIGTERM goes to the whole group, and this process has to outlive it. A handler, unlike SIG_IGN, does not
    # pass on to the command.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and not _owner_is_gone(0.2):
        pass
    if child.returncode is None:
        os.killpg(0, signal.SIGTERM)
        _wait(child, grace_seconds)
    print(f"megatron-fspo: vLLM ended, status {child.poll()}", flush=True)
    os.killpg(0, signal.SIGKILL)


def _owner_is_gone(seconds: float) -> bool:
    """Waits up to ``seconds``; the owner never writes, so what can be read is the end."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
