"""What a process has started."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil


def started(pid: int | None = None) -> list[psutil.Process]:
    """Processes below this one, or the one given; without Python's own tracker of semaphores, which stays."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
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
