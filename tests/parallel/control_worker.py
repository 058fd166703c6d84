"""Ranks that die, fail or stand still while others wait; no launcher watches them.

Forks three ranks for each case, all cases at once, and writes what became of every rank. The store is in the
parent, as torchrun has it in its agent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from megatron_fspo.errors import TrainingError
from megatron_fspo.job.control import JobControl
from megatron_fspo.parallel.control import Control, Timeouts

SILENCE, GRACE = 8.0, 2.0
SHORT, LONG = 3.0, SILENCE + 3.0
RANKS = 3


def die() -> None:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # the parent lets it go on


def wait_for_servers(control: Control) -> None:
    with control.waiting("the servers") as wait:
        while True:
            time.sleep(0.1)
            wait.check()


def follower_dies(control: Control, rank: int) -> None:
    die() if rank == 1 else wait_for_servers(control) if rank == 0 else control.receive("the responses")


def first_dies(control: Control, rank: int) -> None:
    die() if rank == 0 else control.receive("the responses")


def grader_dies(control: Control, rank: int) -> None:
    if rank == 2:
        die()
    control.barrier("the grades")


def grader_fails(control: Control, rank: int) -> None:
    """The last rank hears nothing of it: it is in a long call."""
    if rank == 1:
        time.sleep(1)
        control.fail(ValueError("no such answer"))
    elif rank == 0:
        control.barrier("the grades")
    else:
        time.sleep(300)


def stopped_for_short(control: Control, rank: int) -> None:
    if rank == 1:
        stand_still()
    control.barrier("the grades")


def stopped_in_a_collective(control: Control, rank: int) -> None:
    """The others do not hear of it: they are in a call that does not end, as a collective is."""
    if rank == 1:
        stand_still()
    time.sleep(300)


CASES: list[tuple[Callable[[Control, int], None], float]] = [
    (follower_dies, 0),
    (first_dies, 0),
    (grader_dies, 0),
    (grader_fails, 0),
    (stopped_for_short, SHORT),
    (stopped_in_a_collective, LONG),
]


def be_rank(work: Callable[[Control, int], None], rank: int, folder: Path) -> int:
    """The exit status; the file says what happened, if the process got so far."""
    sys.stderr = (folder / f"{work.__name__}-{rank}.err").open("w")
    while not (folder / "port").exists():
        time.sleep(0.05)
    store = TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
    timeouts = Timeouts(silence=SILENCE, grace=GRACE)
    control = JobControl(PrefixStore(work.__name__, store).clone(), rank, RANKS, timeouts)
    control.barrier("the start")
    began, said = time.monotonic(), "done"
    try:
        work(control, rank)
    except TrainingError as error:
        said = str(error)
    answer = {"said": said, "seconds": time.monotonic() - began, "process": os.getpid()}
    (folder / f"{work.__name__}-{rank}.json").write_text(json.dumps(answer))
    control.close()
    return 0


def main(out: Path) -> None:
    folder = out.parent
    children = {}
    for work, _ in CASES:
        for rank in range(RANKS):
            process = os.fork()
            if process == 0:
                status = 3
                try:
                    status = be_rank(work, rank, folder)
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children[process] = (work.__name__, rank)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port.partial").write_text(str(store.port))
    (folder / "port.partial").rename(folder / "port")
    still = {name.__name__: seconds for name, seconds in CASES if seconds}
    timers: list[tuple[float, int]] = []
    found: dict[str, list[object]] = {work.__name__: [None] * RANKS for work, _ in CASES}
    while children:
        process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        for when, stopped in list(timers):
            if time.monotonic() > when:
                os.kill(stopped, signal.SIGCONT)
                timers.remove((when, stopped))
        if process == 0:
            time.sleep(0.02)
        elif os.WIFSTOPPED(status):
            timers.append((time.monotonic() + still[children[process][0]], process))
        else:
            name, rank = children.pop(process)
            file = folder / f"{name}-{rank}.json"
            found[name][rank] = {
                "status": os.waitstatus_to_exitcode(status),
                "error": (folder / f"{name}-{rank}.err").read_text(),
                "pid": process,
                **(json.loads(file.read_text()) if file.exists() else {"said": None, "seconds": None}),
            }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
