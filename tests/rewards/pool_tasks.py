"""What the tests have a worker do. Imported by workers: light."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from megatron_fspo.rewards import worker

FORBIDDEN = ("open", "os_open", "system", "popen", "fork", "connect", "remove", "mkdir", "big_file")


_kept: list[bytearray] = []
_LIBC = ctypes.CDLL(None)  # a task may not load it


def do(task: str, *args: Any) -> Any:
    return globals()[f"_{task}"](*args)


def _echo(value: Any) -> Any:
    return value


def _sleep(seconds: float = 60) -> None:
    time.sleep(seconds)


def _loop_in_c() -> int:
    return len(str(7 ** (10**9)))


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(0.1)


def _crash() -> None:
    ctypes.string_at(0)


def _exit() -> None:
    os._exit(3)


def _memory(size: int) -> int:
    return len(bytearray(size))


def _too_much_memory_in_c() -> int:
    return 1 << (8 * 2**30)


def _burn(seconds: float) -> None:
    worker._limit_cpu_time(seconds)
    while True:
        pass


def _modules() -> list[str]:
    return sorted(sys.modules)


def _length(text: str) -> int:
    return len(text)


def _keep(size: int) -> int:
    _kept.append(bytearray(size))
    return size


def _returns_object() -> object:
    return object()


def _returns_nothing_json_has() -> object:
    return {(1, 2): 3}


def _forges() -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            os.write(descriptor, b'[100000, "forged", null, false]\n')


def _shout() -> None:
    print("model text")
    print("model text", file=sys.stderr)
    os.write(1, b"model text\n")


def _fail() -> float:
    return 1 / 0


def _open(file: str) -> None:
    open(file, "w").close()


def _os_open(file: str) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_RDWR))


def _system(file: str) -> None:
    os.system(f"touch {file}")


def _popen(file: str) -> None:
    subprocess.run(["touch", file], check=True)


def _fork(file: str) -> None:
    if os.fork() == 0:
        os._exit(0)


def _fork_in_c() -> int:
    """The process id of a child that no hook of Python sees."""
    child = _LIBC.fork()
    if child == 0:
        time.sleep(600)
    return int(child)


def _connect(file: str) -> None:
    socket.create_connection(("127.0.0.1", 9))


def _remove(file: str) -> None:
    os.remove(file)


def _mkdir(file: str) -> None:
    os.mkdir(file)


def _big_file(file: str) -> None:
    """The limit of the system, where Python's hook is passed by."""
    libc = ctypes.CDLL(None)  # loads nothing that is not there
    descriptor = libc.memfd_create(b"none", 0)
    os.write(descriptor, b"x" * 100)
