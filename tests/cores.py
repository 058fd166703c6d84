"""What the cores did while ``.ci/run`` ran, from lines of /proc/stat that it writes down each second."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

TICKS = 100
"""Of a second, in /proc/stat."""


def summed_up(lines: str) -> str:
    """CPU time of all cores, and the share of the time in which none of them was idle."""
    cores: dict[str, list[tuple[int, int]]] = {}
    for name, *ticks in (line.split() for line in lines.splitlines() if line.count(" ") >= 8):
        user, nice, system, idle, waiting, *interrupts = map(int, ticks[:8])
        busy = user + nice + system + sum(interrupts)
        cores.setdefault(name, []).append((busy, busy + idle + waiting))
    shortest = min(map(len, cores.values()))
    # Core, second, of which busy and in all.
    ticks_of = np.array([[np.subtract(b, a) for a, b in pairwise(one[:shortest])] for one in cores.values()])
    busy, whole = np.moveaxis(ticks_of, -1, 0)
    minutes, share = busy.sum() / TICKS / 60, busy.min(axis=0).sum() / whole.max(axis=0).sum()
    return f"{minutes:.1f} CPU-minutes; all {len(cores)} cores worked in {share:.0%} of the time"
