"""One job writes into the folder of a run: the one whose lock file is there.

``flock`` is unreliable on some network file systems. This lock is a file that only one process can make
(``O_EXCL``); it names its owner, who refreshes its time while it lives. An owner is gone when it was a
process of this machine (this boot, these process numbers) that has ended; or when it is elsewhere, and has
not refreshed the file for :data:`STALE_SECONDS` on the file system's own clock. Then the lock is taken over,
and a line says so. An owner that stood still for so long finds that out, and stops.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_fspo.errors import InputError, TrainingError

LOCK = "job.lock"
"""The file, in the folder of the run."""
REFRESH_SECONDS = 10.0
STALE_SECONDS = 120.0
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Owner:
    """Who holds a lock, as its file says."""

    nonce: str
    """Name of this lock and no other."""
    host: str
    process: int
    started: str
    """When the process began, as the kernel counts; a later process of the same number has another."""
    machine: str
    """The boot and the table of processes in which the number means this process; "" where it is unknown."""
    job: str
    """The name of the job for the scheduler or torchrun; may be empty."""
    since: str
    """Local time, for people."""

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.process} on {self.host}{job}, since {self.since}"

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            nonce=secrets.token_hex(8),
            host=socket.gethostname(),
            process=os.getpid(),
            started=_started(os.getpid()) or "",
            machine=_machine(),
            job=os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", ""),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def lives(self) -> bool | None:
        """Return whether the process is there; None where that cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's, and perhaps hidden from us
            return None
        return _started(self.process) == self.started


class FolderThread:
    """Calls functions that write into the folder of a run, one after the other, every
    :data:`REFRESH_SECONDS`.

    It is not the thread of :mod:`~megatron_fspo.job.control`: a file server may stand still for minutes,
    and the ranks would take one that waits for it for dead. ``first`` is how much of the interval to wait
    before the first time.
    """

    def __init__(self, *writes: Callable[[], object], first: float = 1.0) -> None:
        self.writes = [*writes]
        self._closed = threading.Event()
        # A daemon: a file server that does not answer holds nobody up at the end.
        self._thread = threading.Thread(target=self._main, args=(first,), name="run folder", daemon=True)
        self._thread.start()

    def close(self, seconds: float | None = None) -> bool:
        """Stop, and wait for the function under way, at most so long; returns whether it has ended."""
        self._closed.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self, first: float) -> None:
        pause = REFRESH_SECONDS * first
        while not self._closed.wait(pause):
            for write in list(self.writes):
                write()
            pause = REFRESH_SECONDS


class FolderLock:
    """The lock of one folder, held by this process from the call to :meth:`release`.

    Args:
        folder: of the run; is made if it is not there.
        pause: is called between two looks at another's lock; may raise, to end the wait.
        say: takes a line for the console; by default it goes to stderr.

    Raises:
        InputError: another process lives and holds it, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pause: Callable[[], object] = lambda: None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.owner = Owner.this_process()
        say = say or (lambda line: print(f"megatron-fspo: {line}", file=sys.stderr, flush=True))
        self._path = folder / LOCK
        self._problem: str | None = None
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take(pause, say)
        except OSError as error:
            self._remove_made()
            raise InputError(f"run.folder: {folder} cannot be written: {error.strerror or error}") from None
        self.thread = FolderThread(self._refresh)

    def check(self) -> None:
        """Do nothing while the folder is this job's.

        Raises:
            TrainingError: another job took the lock over, or the file is gone.
        """
        if self._problem is not None:
            raise TrainingError(self._problem)

    def release(self) -> None:
        """Give the folder free. If nothing else was written into it, and it was made for this, it goes."""
        self.thread.close()
        with suppress(OSError):
            if read_owner(self._path.parent) == self.owner:
                self._path.unlink()
        self._remove_made()

    def _take(self, pause: Callable[[], object], say: Callable[[str], object]) -> None:
        while not _make(self._path, self.owner):
            try:
                before = read_owner(self._path.parent)
            except FileNotFoundError:  # given free just now
                continue
            _wait_until_gone(self._path, before, pause, say)
            if _set_aside(self._path, before):
                say(f"{self._path}: took over the lock of {_named(before)}, which is gone")

    def _refresh(self) -> None:
        if self._problem is not None:
            return
        try:
            owner = read_owner(self._path.parent)
            if owner == self.owner:
                os.utime(self._path)  # without a time: that of the file server
            else:
                self._problem = f"{self._path}: the folder of this run was taken over by {_named(owner)}"
        except FileNotFoundError:
            self._problem = f"{self._path} is gone: was the folder of this run removed?"
        except OSError:
            pass  # a file server that does not answer now may answer later

    def _remove_made(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()


def check_not_held(folder: Path, mine: Owner | None = None) -> None:
    """Raise ``InputError`` if a process that lives on this machine holds the lock, other than
    ``mine``."""
    try:
        owner = read_owner(folder)
    except OSError:
        return
    if owner is not None and owner != mine and owner.lives():
        raise _held(folder / LOCK, owner)


def read_owner(folder: Path, name: str = LOCK) -> Owner | None:
    """The owner that the lock file of ``folder`` names; None while nothing is in it that can be read.

    Raises:
        FileNotFoundError: there is no lock.
    """
    try:
        return Owner(**json.loads((folder / name).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None


def _make(path: Path, owner: Owner) -> bool:
    """Try to make the file; only one of all who try at the same time succeeds."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(file, json.dumps(asdict(owner)).encode())
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)
    return True


def _wait_until_gone(
    path: Path, owner: Owner | None, pause: Callable[[], object], say: Callable[[str], object]
) -> None:
    """Return when the owner is gone; raise when it lives."""
    lives = owner.lives() if owner is not None else None
    if lives:
        raise _held(path, owner)
    if lives is False:
        return
    began, first = time.monotonic(), refreshed(path)
    age = now_there(path.parent) - first
    if age < STALE_SECONDS:
        say(f"{path} is held by {_named(owner)}: looking for {STALE_SECONDS - age:.0f} s whether it lives")
    while age + time.monotonic() - began < STALE_SECONDS:
        pause()
        time.sleep(POLL_SECONDS)
        if refreshed(path) != first:
            raise _held(path, owner)


def _set_aside(path: Path, owner: Owner | None) -> bool:
    """Remove the lock of an owner that is gone; False if somebody else was faster."""
    aside = path.with_name(f"{LOCK}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    if read_owner(aside.parent, aside.name) != owner:  # it is the lock of who was faster
        aside.rename(path)
        return False
    aside.unlink()
    return True


def _held(path: Path, owner: Owner | None) -> InputError:
    return InputError(
        f"{path.parent} is in use by {_named(owner)}: wait for its end, stop it, or change run.name"
    )


def _named(owner: Owner | None) -> str:
    return str(owner) if owner is not None else "an unknown process"


def refreshed(path: Path) -> float:
    """The time of the last refresh on the file system's clock; infinite once the file is gone."""
    try:
        with path.open("rb") as file:  # opened first: then a network file system asks its server
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:  # given free just now: that is a change, too
        return float("inf")


def now_there(folder: Path) -> float:
    """The time on the file system's clock."""
    probe = folder / f"{LOCK}.{secrets.token_hex(4)}"
    with probe.open("xb") as file:
        file.write(b"-")
        file.flush()
        seconds = os.fstat(file.fileno()).st_mtime
    probe.unlink()
    return seconds


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> str | None:
    """The start time of a process of this machine; None if there is none, or only its remains."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program, in parentheses, may have any characters in it.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
