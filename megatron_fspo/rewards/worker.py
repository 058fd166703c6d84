"""A worker process: serves one function to a :class:`~megatron_fspo.rewards.pool.KillablePool`.

A worker works with what a model wrote, and gives no answer rather than harm: it is killed after a while (by
the pool), has a limit on memory and one on CPU time, starts no process, opens no connection and no file to
write. None of this is needed for math-verify, which evaluates no text, as far as is known. Nor is it a
sandbox for text that is meant to be run.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megatron_fspo.job.parent import end_with_parent

_PAGE = resource.getpagesize()
_REFUSED = frozenset(
    "os.system os.exec os.fork os.forkpty os.posix_spawn os.startfile os.kill os.killpg subprocess.Popen"
    " pty.spawn socket.connect socket.bind socket.sendto ctypes.dlopen os.remove os.rename os.rmdir os.mkdir"
    " os.chmod os.chown os.link os.symlink os.truncate os.putenv os.chdir shutil.rmtree shutil.move"
    " shutil.copyfile".split()
)


def main(
    descriptor: int, parent: int, function: str, seconds: float, memory_bytes: int, most_tasks: int
) -> None:
    """Answer tasks until the socket is closed, or a fresh process is better.

    A task is a line of JSON, the function's arguments. An answer is one too: the number of the task, from 1;
    the function's value, or None; the name, the text and the traceback of the exception, or None; and whether
    the worker ends after it. Answer 0 is to no task: the libraries are there, or why not.

    Args:
        descriptor: of the socket.
        parent: process id; the worker ends with it, however that ends.
        function: as ``module:name``.
        seconds: of CPU time for a task.
        memory_bytes: beyond what the process has when the function's module is imported.
        most_tasks: before a fresh process is better.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
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
        logging.disable(logging.CRITICAL)  # what a library says of such text could fill a disk
        sys.addaudithook(_refuse)
        answer(0, "null, null", last=False)
        for number, task in enumerate(stream, start=1):
            _limit_cpu_time(seconds)
            try:
                value = f"{json.dumps(call(*json.loads(task)), default=float)}, null"
            except Exception as error:
                value = _error(error)
            # Each task has the same memory: what the ones before left in caches goes with the process.
            last = number == most_tasks or _virtual_bytes() > plenty
            answer(number, value, last)
            if last:
                return


def _error(error: Exception) -> str:
    lines = "".join(traceback.format_exception(error))
    return f"null, {json.dumps([type(error).__name__, str(error), lines])}"


def _limit_cpu_time(seconds: float) -> None:
    """Limit the CPU time of the next task: the pool kills sooner, unless itself stopped or starved."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, most))


def _refuse(event: str, details: tuple[Any, ...]) -> None:
    """An audit hook: no text that got itself evaluated reaches the outside by Python's own means."""
    writes = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
    if event in _REFUSED or writes:
        raise PermissionError(f"{event} in a worker")


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE
