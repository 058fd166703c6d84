"""``megatron-fspo serve``: keep a server running until told to stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.announce import announce
from megatron_fspo.rollout.api_key import api_key
from megatron_fspo.rollout.server.flags import ServerOptions
from megatron_fspo.rollout.server.process import ServerProcess

MAX_RESTARTS = 3
RESTART_WINDOW = 600.0
"""Seconds: more restarts than the maximum in this time is no accident."""
_POLL_SECONDS = 0.5


class Stop(BaseException):
    """SIGTERM came, or the parent is gone."""


def supervise(options: ServerOptions, *, keep_alive: bool) -> int:
    """Serve until SIGTERM, Ctrl-C, or the parent's end; a server that crashed starts again.

    After a restart it serves the checkpoint's weights, under the version ``default``: who sent it newer ones
    has to send them again.

    Args:
        keep_alive: stay when the parent ends.

    Returns:
        0 after SIGTERM or the parent's end. Ctrl-C goes on as KeyboardInterrupt.

    Raises:
        InputError, TrainingError: as :meth:`ServerProcess.start`; or it crashed too often.
    """
    # Taken first, so that a parent that ends while we start is noticed.
    parent = parent_to_watch(keep_alive)
    announcement: Path | None = None
    server = ServerProcess(options)
    if api_key() is None and not options.loopback_only:
        _say(f"--host {options.host}: no key, so whoever reaches port {options.port} runs any code here")
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        server.launch()
        server.wait(lambda: pause(parent))
        print(f"vLLM is ready at {server.url}, its log is {options.log_file}", flush=True)
        if options.announce is not None:
            announcement = announce(options.announce, options.public_url)
        _watch(server, parent)
    except Stop:
        return 0
    finally:
        # Nothing interrupts the end: what is left over would hold the port and the memory.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        if announcement is not None:
            announcement.unlink(missing_ok=True)
        server.stop()
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def _watch(server: ServerProcess, parent: int | None) -> NoReturn:
    restarts: deque[float] = deque()
    while True:
        pause(parent)
        if server.alive:
            continue
        now = time.monotonic()
        while restarts and restarts[0] < now - RESTART_WINDOW:
            restarts.popleft()
        if len(restarts) == MAX_RESTARTS:
            raise TrainingError(
                f"vLLM ended {MAX_RESTARTS + 1} times in {RESTART_WINDOW / 60:g} minutes; {server.log_end()}"
            )
        restarts.append(now)
        _say(f"vLLM ended; restart {len(restarts)}, of at most {MAX_RESTARTS} in {RESTART_WINDOW / 60:g} min")
        server.launch()
        try:
            server.wait(lambda: pause(parent))
            print(f"vLLM is ready again at {server.url}, with the checkpoint's weights", flush=True)
        except TrainingError:
            server.stop()  # one that hangs is one that crashed


def parent_to_watch(keep_alive: bool) -> int | None:
    """The process with which to end, for :func:`pause`."""
    return None if keep_alive else os.getppid()


def pause(parent: int | None) -> None:
    """Between two looks.

    Raises:
        Stop: the parent is gone.
    """
    if parent is not None and os.getppid() != parent:
        raise Stop
    time.sleep(_POLL_SECONDS)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stop


def _say(line: str) -> None:
    print(f"megatron-fspo: {line}", file=sys.stderr, flush=True)
