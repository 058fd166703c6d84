"""What runs inside a worker process. Imports nothing heavy: the parent imports it too, to name its functions.

A worker works with what a model wrote, and gives no answer rather than harm: it is killed after a while (by
the pool), has a limit on memory and one on CPU time, starts no process, opens no connection and no file to
write. None of this is needed for math-verify, which evaluates no text, as far as is known. Nor is it a
sandbox for text that is meant to be run.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import math
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

_PR_SET_PDEATHSIG = 1
_PAGE = resource.getpagesize()
_REFUSED = {
    *(
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.startfile",
        "os.kill",
        "os.killpg",
    ),
    *("subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.sendto", "ctypes.dlopen"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink"),
    *("os.truncate", "shutil.rmtree", "shutil.move", "shutil.copyfile", "os.putenv", "os.chdir"),
}
_much = sys.maxsize
"""Bytes of memory after a task from which caches are emptied."""


def limit(memory_bytes: int, libraries: tuple[str, ...]) -> None:
    """Prepare this process for text of a model; first thing in a worker.

    Args:
        memory_bytes: what it may take beyond what it has with ``libraries``.
    """
    _die_with_parent()
    _let_go_of_the_server()
    # At once: pebble's own handler is Python, and code that hangs in C never gets there.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in libraries:
        importlib.import_module(name)  # the server has them already, where it found them
    global _much
    taken = _virtual_bytes()
    _much = taken + memory_bytes // 2
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # What a library has to say of such text is of no interest, and could fill a disk.
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.addaudithook(_refuse)


def begin(seconds: float) -> None:
    """Allow a task so much CPU time: the pool kills sooner, unless its own process is stopped or starved."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, most))


def end() -> None:
    """Give back what a task left in caches, if that is much: the next one has the same limit."""
    if _virtual_bytes() > _much:
        _forget()


def same_mathematics(gold: str, found: str, seconds: float) -> tuple[bool, bool]:
    """:func:`compare` as a task, which may take so much CPU time."""
    begin(seconds)
    try:
        return compare(gold, found)
    finally:
        end()


def compare(gold: str, found: str) -> tuple[bool, bool]:
    """(whether math-verify takes ``found`` for ``gold``, whether it could read ``found``).

    The order matters: it is not symmetric (docs/rewards.md). Its own time limits are off, as the pool's
    replaces them: they are alarms of the main thread that code in C does not hear.
    """
    from math_verify import verify

    if is_word(gold) and is_word(found):
        # Else each letter is a factor, and "Friday" is "Fridya".
        gold, found = rf"\text{{{gold}}}", rf"\text{{{found}}}"
    read = _parsed(found)
    readable = any(not isinstance(one, str) for one in read)
    return bool(verify(_parsed_reference(gold), read, timeout_seconds=None)), readable


def is_word(answer: str) -> bool:
    """Whether this is text, as far as a look tells: a short word alone is a product (``xy``)."""
    return re.fullmatch(r"[A-Za-z]{4,}|[A-Za-z]{2,}(?:[ '-][A-Za-z]{2,})+", answer) is not None


def _parsed(answer: str) -> list[Any]:
    from math_verify import parse

    has_marks = "\\boxed" in answer or re.search(r"(?<!\\)\$", answer)
    whole = answer if has_marks else f"\\boxed{{{_respelt(answer)}}}"
    read: list[Any] = parse(whole, parsing_timeout=None)
    return read


_parsed_reference = lru_cache(maxsize=64)(_parsed)


def _respelt(answer: str) -> str:
    """``1.5e3`` and ``2 1/2`` as LaTeX: math-verify takes the e for Euler's number, and forgets the 2."""
    answer = re.sub(
        r"(?<![\w.])(\d+\.?\d*)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}", answer, flags=re.ASCII
    )
    return re.sub(r"(?<![\w./])(\d+) +(\d+)/(\d+)(?![\w./])", r"\1\\frac{\2}{\3}", answer, flags=re.ASCII)


def _die_with_parent() -> None:
    """The parent is the server, which ends with the trainer, however that ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def _let_go_of_the_server() -> None:
    """Close our copy of the pipe that keeps the server alive: the trainer's is to be the only one."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _refuse(event: str, details: tuple[Any, ...]) -> None:
    """An audit hook: no text that got itself evaluated reaches the outside by Python's own means."""
    writes = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
    if event in _REFUSED or writes:
        raise PermissionError(f"{event} in a grader's worker")


def _forget() -> None:
    from math_verify import parser

    for cached in (
        parser.parse_latex_cached,
        parser.parse_expr_cached,
        parser.extract_latex,
        _parsed_reference,
    ):
        cached.cache_clear()
    if (cache := sys.modules.get("sympy.core.cache")) is not None:
        cache.clear_cache()
    gc.collect()


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE
