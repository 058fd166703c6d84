"""Leaving a job."""

from __future__ import annotations

import re
from pathlib import Path

from launch import run_worker


def test_the_threads_of_its_groups_end() -> None:
    """Every gloo group has three; with dozens of groups and layouts they would slow each other down."""
    said = run_worker(Path(__file__).with_name("leave_worker.py"), nproc=2)
    threads = [int(number) for number in re.findall(r"threads: (\d+)", said)]
    assert len(threads) == 4
    assert threads[-1] <= threads[0] + 3, threads
