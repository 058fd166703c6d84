"""Child processes: an environment without secrets, an end with the parent, and of the whole group."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError

_PASSED_ON = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR PYTHONPATH VIRTUAL_ENV LD_LIBRARY_PATH"
    " SSL_CERT_FILE OMP_NUM_THREADS".split()
)
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, even by ``kill -9``. Linux only.

    Strictly, the parent is the thread that started this process. Child processes do not inherit the setting.
    If ``parent``, the id of the parent process, is given and has already ended, this process exits at once.
    Raises ``OSError`` if the kernel refuses.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the process has ended. Does not reap it, so its number remains that of its group."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has reaped it
        return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, with its group, unless it has been reaped."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill the processes that have ``mark``, name=value, in their environment."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def kill_and_wait(process: subprocess.Popen[bytes]) -> None:
    """Kill a process as :func:`kill_group`, and reap it."""
    kill_group(process)
    with suppress(subprocess.TimeoutExpired):  # in a system call that cannot be interrupted
        process.wait(10)


async def start_python(
    main: Callable[..., None], *settings: Any, env: Mapping[str, str] | None = None, quiet: bool = False
) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader, asyncio.StreamWriter]:
    """Call ``main(descriptor of a socket, id of this process, *settings)`` in a new interpreter. Not a fork,
    as the trainer has threads, GPUs and process groups. Return the process, and reader and writer of the
    other end of the socket, for lines of at most 16 MiB."""
    ours, theirs = socket.socketpair()
    with theirs:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {main.__module__} import {main.__name__}; "
            f"{main.__name__}({theirs.fileno()}, *{(os.getpid(), *settings)!r})"
        )
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[theirs.fileno()],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )
    try:
        return process, *await asyncio.open_connection(sock=ours, limit=2**24)
    except BaseException:  # cancelled
        ours.close()
        kill_and_wait(process)
        raise


def clean_environment(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of this process that any program needs, and those of ``names``: no others, as a
    child may run what a model wrote, and keys of servers and services are in variables too. Raises
    ``InputError`` if one of ``names`` is not set."""
    if missing := [name for name in names if name not in os.environ]:
        raise InputError(f"environment.variables: {', '.join(missing)} not set")
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith("LC_") or name in names
    }
