"""Ends a process together with its parent, however the parent ends. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

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
