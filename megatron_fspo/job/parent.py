"""A process that ends with the one that started it, however that ends. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, also by ``kill -9``. Linux only.

    The parent is, strictly, the thread that started this process. Processes that this one starts do not
    inherit it. Where the caller knows the parent's id, one that is gone already ends this process at once.
    Raises ``OSError`` if the kernel refuses.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended just before
        os._exit(1)
