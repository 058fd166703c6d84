"""Which processes graders have started."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil


def started() -> list[psutil.Process]:
    """Fork servers and workers below this process. Other tests have others: those are not ours to end."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "multiprocessing.forkserver" in " ".join(
                child.cmdline()
            ):
                found.append(child)
    return found


def workers() -> list[psutil.Process]:
    """Of the graders of this process: the children of fork servers."""
    return [child for child in started() if child.ppid() != psutil.Process().pid]


def gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    """Whether all of them end in time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def until(condition: object, seconds: float = 10.0) -> bool:
    """Whether the condition, a function, comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False
