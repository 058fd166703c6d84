"""A program with a busy pool that ends in the way of its argument."""

from __future__ import annotations

import sys
import time

from megatron_fspo.rewards.pool import KillablePool


def main(end: str) -> None:
    pool = KillablePool("pool_tasks:do", workers=2, seconds=600.0, memory_gb=0.25)
    pool.submit("loop_in_c")
    pool.submit("sleep")
    time.sleep(0.5)
    print("busy", flush=True)
    sys.stdin.readline()  # somebody looks at what runs
    if end == "exception":
        1 / 0  # noqa: B018
    if end == "exit":
        return
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
