"""Which processes graders have started."""

from __future__ import annotations

import re
from contextlib import suppress

import psutil


def workers() -> list[psutil.Process]:
    """The workers and reward processes of the graders of this process."""
    running = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and re.search(
                r"rewards\.(worker|process)", " ".join(child.cmdline())
            ):
                running.append(child)
    return running


def gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    """Whether all of them end in time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
