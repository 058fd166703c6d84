"""Starts ranks by rank_server.py, and waits for them as torchrun does."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import TCPStore

SERVER = Path(__file__).with_name("rank_server.py")
GRACE = 30.0
"""Seconds from SIGTERM to SIGKILL for ranks that are left when one has failed."""


class Server:
    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-W", "ignore", str(SERVER)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.ended: dict[int, int] = {}
        """Process id → exit status."""

    def fork(self, request: Mapping[str, Any]) -> int:
        """The process id of a new rank."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        while (pid := self.read().get("started")) is None:
            pass
        self.ended.pop(pid, None)  # an earlier rank had the id
        return int(pid)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def read(self) -> dict[str, int]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server of ranks is dead"
        answer: dict[str, int] = json.loads(line)
        if "ended" in answer:
            self.ended[answer["ended"]] = answer["status"]
        return answer


@cache
def server(odd: bool, machine: frozenset[tuple[str, str]]) -> Server:
    """One for even ranks, one for odd ones, on each fake machine that is asked of.

    In the two, sets of strings have an order of their own, as they have on ranks that torchrun starts: a
    program that takes the order to be the same everywhere fails.

    Args:
        machine: the variables ``FAKE_…``, which are read once, at the start of a process.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    paths = [str(SERVER.parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    started = Server({**environment, **dict(machine), "PYTHONPATH": os.pathsep.join(paths)})
    atexit.register(started.close)
    return started


def run_forked(
    program: Sequence[str], nproc: int, folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """``python program...`` on ``nproc`` ranks, to the end of all; 0: in one process that is no rank."""
    machine = frozenset(item for item in environment.items() if item[0].startswith("FAKE_"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        out.touch()
        err.touch()
        ranks: dict[int, Server] = {}
        try:
            for rank in range(max(nproc, 1)):
                request = {
                    "program": list(program),
                    "folder": str(folder),
                    "environment": {**environment, **(_place(rank, nproc, store.port) if nproc else {})},
                    "out": str(out),
                    "err": str(err),
                }
                started = server(bool(rank % 2), machine)
                ranks[started.fork(request)] = started
            failed = _wait(ranks, timeout)
        except TimeoutError:
            message = out.read_text() + err.read_text()
            raise subprocess.TimeoutExpired(list(program), timeout, message) from None
        finally:
            _kill(ranks)
        # torchrun ends with 1, whatever a rank ended with.
        status = int(failed) if nproc else next(started.ended[pid] for pid, started in ranks.items())
        return subprocess.CompletedProcess(list(program), status, out.read_text(), err.read_text())


def _place(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Variables that torchrun sets for a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    return {key: str(value) for key, value in (place | meeting | agent).items()}


def _wait(ranks: Mapping[int, Server], timeout: float) -> bool:
    """Wait for all ranks; True if one failed, upon which the others are asked to end."""
    deadline, failed = time.monotonic() + timeout, False
    while left := [pid for pid, server in ranks.items() if pid not in server.ended]:
        if not failed and any(server.ended.get(pid) for pid, server in ranks.items()):
            failed = True
            deadline = time.monotonic() + GRACE
            for pid in left:
                _signal(pid, signal.SIGTERM)
        seconds = deadline - time.monotonic()
        if seconds < 0:
            if failed:
                return True
            raise TimeoutError
        streams = {ranks[pid].process.stdout: ranks[pid] for pid in left}
        for stream in select.select(list(streams), [], [], seconds)[0]:
            streams[stream].read()
    return any(server.ended[pid] for pid, server in ranks.items())


def _kill(ranks: Mapping[int, Server]) -> None:
    """Ranks that are left, and the processes that ranks started."""
    for pid, server in ranks.items():
        _signal(pid, signal.SIGKILL)
        while pid not in server.ended:
            server.read()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
