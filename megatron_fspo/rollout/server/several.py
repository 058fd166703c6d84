"""Several servers on one machine, each on GPUs of its own."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from types import FrameType

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.server.flags import ServerOptions
from megatron_fspo.rollout.server.supervise import Stop, parent_to_watch, pause, supervise


def gpu_numbers(text: str) -> tuple[str, ...]:
    """``0-3,6`` → 0, 1, 2, 3 and 6.

    Raises:
        InputError: it is not that, or names one twice.
    """
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise InputError(f"--gpus {text}: numbers and ranges are wanted, such as 0-3,6")
        found += map(str, range(int(first), int(last or first) + 1))
    if len(set(found)) < len(found) or not found:
        raise InputError(f"--gpus {text}: names a GPU twice, or none")
    return tuple(found)


def place(options: ServerOptions, gpus: Sequence[str], per_server: int) -> list[ServerOptions]:
    """One server for each run of ``per_server`` GPUs, on ports that follow one another.

    Raises:
        InputError: GPUs would be left over; or one log file is named for several servers.
    """
    if per_server < 1 or len(gpus) % per_server:
        raise InputError(f"--gpus-per-server {per_server} does not divide the {len(gpus)} of --gpus")
    shares = [tuple(gpus[i : i + per_server]) for i in range(0, len(gpus), per_server)]
    if options.log is not None and len(shares) > 1:
        raise InputError(f"--log {options.log}: {len(shares)} servers cannot share one")
    return [replace(options, gpus=share, port=options.port + i) for i, share in enumerate(shares)]


def supervise_all(servers: Sequence[ServerOptions], *, keep_alive: bool) -> int:
    """``supervise`` each, in a process of its own, until told to stop.

    A server that is given up leaves the others alone.

    Returns:
        0 after SIGTERM or the parent's end; 1 when all servers have ended by themselves.
    """
    if len(servers) == 1:
        return supervise(servers[0], keep_alive=keep_alive)
    parent = parent_to_watch(keep_alive)
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for options in servers:
            process = spawn.Process(target=_one, args=(options,))
            process.start()
            processes.append(process)
        while any(process.is_alive() for process in processes):
            pause(parent)
        return 1
    except Stop:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for child in processes:
            child.terminate()
        for child in processes:
            child.join()
        signal.signal(signal.SIGTERM, before)


def _one(options: ServerOptions) -> None:
    # Ctrl-C reaches every process of the terminal; the first ends the others in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sys.exit(supervise(options, keep_alive=False))
    except (InputError, TrainingError) as error:
        where = f"GPU {','.join(options.gpus)}, port {options.port}"
        print(f"megatron-fspo: {where}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
