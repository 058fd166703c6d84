"""Runs a command and ends all of its processes when stdin closes, which happens when the owner ends.

    python guard.py GRACE_SECONDS COMMAND...

Only the owner has the other end of stdin, and the kernel closes it even after ``kill -9``. Imports nothing of
the package, to start fast and stay small.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time


def main(grace_seconds: float, command: list[str]) -> None:
    """Run the command. Never returns: at the end it kills its process group, itself included."""
    # This process must survive the SIGTERM to its group. The command inherits SIG_IGN, but not a handler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # The owner never writes to the pipe, so it becomes readable only when it is closed.
    while child.poll() is None and not select.select([sys.stdin], [], [], 0.2)[0]:
        pass
    if child.returncode is None:
        os.killpg(0, signal.SIGTERM)
        end = time.monotonic() + grace_seconds
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    print(f"megatron-fspo: vLLM ended, status {child.poll()}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
