"""Ranks end with the agent of torchrun that started them.

An agent that is killed (kill -9, out of memory) takes nobody with it: its ranks would train on, beside those
of the restart. An agent that is asked to stop waits for its ranks, so a graceful stop is left alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

POLL_SECONDS = 1.0


def end_with_agent() -> None:
    """Watch the parent process, if it is torchrun's agent, and end this one within seconds of its end."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="agent watch", daemon=True).start()


def _watch(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(POLL_SECONDS)
    with suppress(OSError):  # the agent may have been who read it
        rank = os.environ.get("RANK", "?")
        print(f"megatron-fspo: rank {rank}: torchrun's agent, process {agent}, is gone", file=sys.stderr)
    os._exit(1)
