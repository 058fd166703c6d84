"""A process that calls math-verify and nothing else, for benchmarks/rewards.py. Light: no torch, no pool."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from megatron_fspo.rewards.worker import compare


def alone(port: Connection) -> None:
    """Grade what is sent, and answer with the verdicts per second."""
    while (tasks := port.recv()) is not None:
        began = time.perf_counter()
        for gold, found in tasks:
            compare(gold, found)
        port.send(len(tasks) / (time.perf_counter() - began))
