"""Jobs of two ranks, started by hand as Slurm would, whose first rank has the store; all at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_fspo.cli.console import exit_status
from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import job, join, start
from megatron_fspo.parallel.groups import share

COLLECTIVE = 12.0
WAIT = Parallel(collective_seconds=COLLECTIVE, silence_seconds=8)
PATIENT = Parallel(silence_seconds=8)


def longer_than_a_collective(rank: int) -> None:
    """The first rank waits for a server; then there is a collective."""
    groups = start(choose_backend("cpu"), parallel=WAIT, seed=1)
    for group in (dist.group.WORLD, groups.tp, groups.pp, groups.cp, groups.dp, groups.dp_cp, groups.ep):
        assert group is not None
        options = group._get_backend(choose_backend("cpu").device).options
        assert options._timeout == timedelta(seconds=COLLECTIVE), options._timeout
    if rank == 0:
        time.sleep(COLLECTIVE + 4)
        groups.control.broadcast("done")
    else:
        assert groups.control.receive("the responses") == "done"
    assert share(rank, group=groups.dp) == 0


def fails_before_it_joins(rank: int) -> None:
    """A file that only one machine lacks."""
    if rank == 1:
        time.sleep(1)
        raise InputError("data.train = x.jsonl: not there")
    join(choose_backend("cpu"), parallel=PATIENT)


def first_is_killed(rank: int) -> None:
    """The store goes with it."""
    control = join(choose_backend("cpu"), parallel=PATIENT)
    if rank == 0:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    control.receive("the responses")


CASES: list[Callable[[int], None]] = [longer_than_a_collective, fails_before_it_joins, first_is_killed]


def be_rank(work: Callable[[int], None], rank: int, port: int, folder: Path) -> int:
    sys.stderr = (folder / f"{work.__name__}-{rank}.err").open("w", buffering=1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}

    def attempt() -> int:
        with job():
            work(rank)
        return 0

    return exit_status(attempt, "worker")


def main(out: Path) -> None:
    folder = out.parent
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for free in (one, two, three):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (one, two, three)]
    children = {}
    for work, port in zip(CASES, ports, strict=True):
        for rank in range(2):
            process = os.fork()
            if process == 0:
                status = 3
                try:
                    status = be_rank(work, rank, port, folder)
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children[process] = (work.__name__, rank, time.monotonic())
    found: dict[str, list[object]] = {work.__name__: [None, None] for work in CASES}
    while children:
        process, status = os.wait()
        name, rank, began = children.pop(process)
        found[name][rank] = {
            "status": os.waitstatus_to_exitcode(status),
            "error": (folder / f"{name}-{rank}.err").read_text(),
            "seconds": time.monotonic() - began,
        }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
