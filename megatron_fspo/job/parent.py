"""Child processes: an environment without secrets, an end with the parent, and of the whole group."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

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
