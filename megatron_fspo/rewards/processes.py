"""How worker processes start: forked from a server of ours that has the libraries and nothing else.

The trainer has threads, GPUs and process groups, so it must not be forked; and a fresh interpreter takes a
second to import sympy. Python's fork server is the way between: started once, it imports ``preload``, and
forks a worker in some 10 ms. Two things of Python's own are not wanted and replaced here: its one server
for the whole process, whose imports may be somebody else's, and that each worker runs the program's main
module again, which imports torch or, without an ``if __name__ == "__main__"``, trains.
"""

from __future__ import annotations

import io
import os
import signal
import threading
from contextlib import suppress
from multiprocessing import reduction, spawn, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.popen_forkserver import Popen
from typing import Any

_servers: dict[tuple[str, ...], ForkServer] = {}
_users: dict[tuple[str, ...], int] = {}
_lock = threading.Lock()


class Context(ForkServerContext):
    """A multiprocessing context whose processes have imported ``preload`` and not the main module.

    Contexts of the same ``preload`` share a server, which ends with the last :meth:`close`, or with this
    process however that ends: it holds one end of a pipe, and nobody else keeps the other one (see
    :func:`~megatron_fspo.rewards.worker.limit`).
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self.preload = preload
        self._closed = False
        with _lock:
            if preload not in _servers:
                _servers[preload] = ForkServer()
                _servers[preload].set_forkserver_preload(list(preload))
            _users[preload] = _users.get(preload, 0) + 1

    def Process(self, *args: Any, **kwargs: Any) -> Process:  # type: ignore[override]
        process = Process(*args, **kwargs)
        process.preload = self.preload
        return process

    def wake(self) -> None:
        """Continue the server if it was stopped (SIGSTOP): the end of a worker is known through it only."""
        pid = _servers[self.preload]._forkserver_pid  # type: ignore[attr-defined]
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """No more processes from here. Those that run are their owner's."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            _users[self.preload] -= 1
            server = None if _users[self.preload] else _servers.pop(self.preload)
        if server is not None:
            server._stop()  # type: ignore[attr-defined]


class Process(ForkServerProcess):
    """A process from the server of its context."""

    preload: tuple[str, ...]

    def _Popen(self, process: Any) -> Popen:  # type: ignore[override]
        return _Popen(process)


class _Popen(Popen):
    def _launch(self, process: Any) -> None:
        """Python's, but for the server and the main module."""
        data = spawn.get_preparation_data(process._name)
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(data, buffer)
            reduction.dump(process, buffer)
        finally:
            set_spawning_popen(None)
        server = _servers[process.preload]
        self.sentinel, write = server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parents = os.dup(write)  # by which the child sees whether we live
        self.finalizer = util.Finalize(self, util.close_fds, (parents, self.sentinel))  # type: ignore[attr-defined]
        with open(write, "wb", closefd=True) as file:
            file.write(buffer.getbuffer())
        self.pid = read_signed(self.sentinel)

    def terminate(self) -> None:
        """At once: a stopped process (SIGSTOP) does not hear SIGTERM, and pebble would wait 3 s for each."""
        self.kill()
