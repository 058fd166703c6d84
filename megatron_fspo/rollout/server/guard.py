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
    # The owner never writes to the pipe, so what can be read is its end.
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
