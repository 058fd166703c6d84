"""``megatron-fspo serve``: runs servers, each on its own GPUs, until it is stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.common import announce, api_key
from megatron_fspo.rollout.server.flags import ServerOptions
from megatron_fspo.rollout.server.process import ServerProcess

MAX_RESTARTS = 3
RESTART_WINDOW = 600.0
"""Seconds in which a server may restart at most ``MAX_RESTARTS`` times."""
_POLL_SECONDS = 0.5


class _Stop(Exception):
    """The servers must end: after SIGTERM or Ctrl-C, or because the parent process has ended."""


def gpu_numbers(text: str) -> tuple[str, ...]:
    """Parse ``0-3,6`` to 0, 1, 2, 3 and 6. Raises ``InputError`` for bad syntax or repeated numbers."""
    numbers: list[str] = []
    for entry in text.split(","):
        first, dash, last = entry.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise InputError(f"--gpus {text}: must be numbers and ranges, such as 0-3,6")
        numbers += map(str, range(int(first), int(last or first) + 1))
    if len(set(numbers)) < len(numbers) or not numbers:
        raise InputError(f"--gpus {text}: has a GPU twice, or none")
    return tuple(numbers)


def assign_gpus(options: ServerOptions, gpus: Sequence[str], per_server: int) -> list[ServerOptions]:
    """Return options of one server per ``per_server`` GPUs, on consecutive ports. Raises ``InputError`` if
    GPUs would be left over, or several servers would share a log file."""
    if per_server < 1 or len(gpus) % per_server:
        raise InputError(f"--gpus-per-server {per_server} does not divide the {len(gpus)} GPUs of --gpus")
    shares = [tuple(gpus[i : i + per_server]) for i in range(0, len(gpus), per_server)]
    if options.log is not None and len(shares) > 1:
        raise InputError(f"--log {options.log}: {len(shares)} servers cannot share one log: remove --log")
    return [replace(options, gpus=share, port=options.port + i) for i, share in enumerate(shares)]


def supervise_all(servers: Sequence[ServerOptions], *, keep_alive: bool) -> int:
    """Run servers until SIGTERM, Ctrl-C or, without ``keep_alive``, the parent's end. Restart crashed ones.

    A restarted server has the checkpoint's weights, as version ``default``, and needs the latest weight
    update again. If one of several servers crashes too often, the others continue.

    Returns:
        0 after SIGTERM or the parent's end; 1 if all of several servers failed. Ctrl-C propagates as
        KeyboardInterrupt.

    Raises:
        InputError, TrainingError: the only server failed as in :class:`ServerProcess`, or crashed too often.
    """
    # Read first, to notice a parent that ends during the start.
    parent = None if keep_alive else os.getppid()
    end = threading.Event()

    def pause() -> None:
        if end.is_set() or (parent is not None and os.getppid() != parent):
            raise _Stop
        end.wait(_POLL_SECONDS)

    before = signal.signal(signal.SIGTERM, lambda *_: end.set())
    with ThreadPoolExecutor(len(servers)) as threads:
        running = [threads.submit(_supervise, options, pause, len(servers) == 1) for options in servers]
        try:
            wait(running)
        finally:
            # Nothing must interrupt the cleanup: leftover processes would hold ports and memory.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
            end.set()
            wait(running)
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, before)
    errors = [server.exception() for server in running]
    if len(errors) == 1 and errors[0] is not None:
        raise errors[0]
    return int(all(errors))


def _supervise(options: ServerOptions, pause: Callable[[], None], alone: bool) -> None:
    announcement: Path | None = None
    try:
        server = ServerProcess(options)
        if api_key() is None and not options.loopback_only:
            _say(f"--host {options.host}: no key: anyone who reaches port {options.port} can run code here")
        try:
            server.launch()
            server.wait(pause)
            print(f"vLLM is ready at {server.url}, its log is {options.log_file}", flush=True)
            if options.announce is not None:
                announcement = announce(options.announce, options.public_url)
            _watch(server, pause)
        finally:
            if announcement is not None:
                announcement.unlink(missing_ok=True)
            server.stop()
    except _Stop:
        return
    except (InputError, TrainingError) as error:
        if not alone:
            _say(f"GPU {','.join(options.gpus)}, port {options.port}: {error}")
        raise


def _watch(server: ServerProcess, pause: Callable[[], None]) -> NoReturn:
    restarts: deque[float] = deque()
    minutes = f"{RESTART_WINDOW / 60:g} min"
    while True:
        pause()
        if server.alive:
            continue
        now = time.monotonic()
        while restarts and restarts[0] < now - RESTART_WINDOW:
            restarts.popleft()
        if len(restarts) == MAX_RESTARTS:
            raise TrainingError(f"vLLM ended {MAX_RESTARTS + 1} times in {minutes}; {server.log_end()}")
        restarts.append(now)
        _say(f"vLLM ended; restart {len(restarts)}, of at most {MAX_RESTARTS} in {minutes}")
        server.launch()
        try:
            server.wait(pause)
            print(f"vLLM is ready again at {server.url}, with the checkpoint's weights", flush=True)
        except TrainingError:
            server.stop()  # a hanging start counts as a crash


def _say(line: str) -> None:
    print(f"megatron-fspo: {line}", file=sys.stderr, flush=True)
