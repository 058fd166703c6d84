"""A worker process: serves one function to a :class:`~megatron_fspo.rewards.pool.KillablePool`.

Its input is model output, so it is restricted: the pool kills it after a timeout; CPU time and memory are
limited; it cannot start processes, open connections or write files. As far as we know math-verify, which
evaluates no text, needs none of this. It is not a sandbox for code that is meant to be executed.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megatron_fspo.job.parent import end_with_parent

_PAGE, _OWN = resource.getpagesize(), str(os.getpid())
_REFUSED = frozenset(
    "os.system os.exec os.fork os.forkpty os.posix_spawn os.startfile os.kill os.killpg subprocess.Popen"
    " pty.spawn socket.connect socket.bind socket.sendto ctypes.dlopen os.remove os.rename os.rmdir os.mkdir"
    " os.chmod os.chown os.link os.symlink os.truncate os.putenv os.chdir shutil.rmtree shutil.move"
    " shutil.copyfile".split()
)


def main(
    descriptor: int, parent: int, function: str, seconds: float, memory_bytes: int, most_tasks: int
) -> None:
    """Answer tasks until the socket is closed, or the process should be replaced.

    A task is a line of JSON with the function's arguments. An answer is a line of JSON with the number of the
    task, from 1; the function's value, or null; type, message and traceback of its exception, or null; and
    whether the worker ends. Answer 0 reports that the function was imported, or why not.
    ``function`` is ``module:name``. Limits are CPU ``seconds`` of a task, ``memory_bytes`` beyond that after
    importing the function, and ``most_tasks`` of the process.
    """
    end_with_parent(parent)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:

        def answer(number: int, value: str, last: bool) -> None:
            stream.write(f"[{number}, {value}, {json.dumps(last)}]\n".encode())
            stream.flush()

        try:
            module, _, name = function.partition(":")
            call: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except Exception as error:
            answer(0, _error(error), last=True)
            return
        taken = _virtual_bytes()
        plenty = taken + memory_bytes // 2
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        logging.disable(logging.CRITICAL)  # warnings about such text could fill a disk
        sys.addaudithook(_refuse)
        answer(0, "null, null", last=False)
        for number, task in enumerate(stream, start=1):
            _limit_cpu_time(seconds)
            try:
                value = f"{json.dumps(call(*json.loads(task)), default=float)}, null"
            except Exception as error:
                value = _error(error)
            # A new process frees caches of earlier tasks, so every task has at least half of the memory.
            last = number == most_tasks or _virtual_bytes() > plenty
            answer(number, value, last)
            if last:
                return


def _error(error: Exception) -> str:
    lines = "".join(traceback.format_exception(error))
    return f"null, {json.dumps([type(error).__name__, str(error), lines])}"


def _limit_cpu_time(seconds: float) -> None:
    """Limit the CPU time of the next task. The pool's timeout comes first unless the pool is stalled."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, most))


def _refuse(event: str, details: tuple[Any, ...]) -> None:
    """Audit hook: keeps evaluated text from reaching the outside through Python functions."""
    refused = event in _REFUSED
    if event == "open":
        path, _, flags = details
        refused = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        if isinstance(path, str | bytes):  # another process may have secrets in its environment
            where = (*os.path.realpath(os.fsdecode(path)).split("/"), "0")
            refused |= where[1] == "proc" and where[2].isdecimal() and where[2] != _OWN
    if refused:
        raise PermissionError(f"{event} in a worker")


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE
