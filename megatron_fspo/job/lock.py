"""The lock of a run folder: only the job that owns the lock file writes there.

``flock`` is unreliable on some network file systems. This lock is a file that only one process can create
(``O_EXCL``). It names its owner, which refreshes the file's time stamp. An owner is gone if it was a process
of this machine (same boot and PID namespace) that has ended, or if it is elsewhere and has not refreshed the
file for :data:`STALE_SECONDS` on the file system's clock. Then the next job takes the lock over and logs it.
An owner that was suspended for so long notices that it lost the lock, and stops.

Of jobs that find an owner gone, only the creator of a claim on it may replace the lock, by a rename, if it is
still that owner's; and keeps it unless somebody has a claim on the new owner by then.
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
"""Name of the lock file in the run folder."""
REFRESH_SECONDS = 10.0
STALE_SECONDS = 120.0
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Owner:
    """The owner of a lock, as written in its file."""

    nonce: str
    """Unique name of this lock."""
    host: str
    process: int
    started: str
    """Start time of the process from ``/proc``, to recognise another process with the same id."""
    machine: str
    """Boot id and PID namespace, in which ``process`` is valid; "" if unknown."""
    job: str
    """Id of the job in Slurm or torchrun; may be empty."""
    since: str
    """Local time, for messages."""

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
        """Return whether the process is running; None if this process cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process, perhaps hidden from us
            return None
        return _started(self.process) == self.started


class FolderThread:
    """A thread that calls functions which write into the run folder, every :data:`REFRESH_SECONDS`.

    It is separate from the heartbeat's thread, since a file server may hang for minutes and the other ranks
    would then report this one as silent. ``first``: the first pause as a fraction of the interval.
    """

    def __init__(self, *writes: Callable[[], object], first: float = 1.0) -> None:
        self.writes = [*writes]
        self._closed = threading.Event()
        # A daemon, so that a hanging file server does not block the exit.
        self._thread = threading.Thread(target=self._main, args=(first,), name="run folder", daemon=True)
        self._thread.start()

    def close(self, seconds: float = REFRESH_SECONDS) -> bool:
        """Stop, wait at most ``seconds`` for the running function, and return whether the thread ended."""
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
    """The lock of a run folder, held by this process from construction until :meth:`release`.

    Args:
        folder: the run folder; created if missing.
        pause: called between two polls of another owner's lock; may raise to end the wait.
        say: prints a line; the default prints to stderr.

    Raises:
        InputError: a live process holds the lock, or the folder cannot be written.
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
        """Raise ``TrainingError`` if another job took over the lock, or the file was removed."""
        if self._problem is not None:
            raise TrainingError(self._problem)

    def release(self) -> None:
        """Release the lock. Folders that were created for it and are still empty are removed."""
        self.thread.close()
        with suppress(OSError):
            claim = _claim(self._path, self.owner)
            if read_owner(self._path.parent) == self.owner and _make(claim, self.owner):
                self._path.unlink()
                claim.unlink()
        self._remove_made()

    def _take(self, pause: Callable[[], object], say: Callable[[str], object]) -> None:
        path = self._path
        while not _make(path, self.owner):
            try:
                before = gone = read_owner(path.parent)
                at, first = path, _claim(path, before)
                claim = first
                _wait_until_gone(at, gone, pause, say)
                while not _make(claim, self.owner):  # another takes over, unless it is gone itself
                    at, gone = claim, read_owner(path.parent, claim.name)
                    claim = _claim(at, gone)
                    _wait_until_gone(at, gone, pause, say)
                if _claim(path, read_owner(path.parent)) != first:  # another has taken over
                    claim.unlink()
                    continue
            except FileNotFoundError:  # just released
                continue
            mine = path.with_name(f"{LOCK}.{self.owner.nonce}")
            _make(mine, self.owner)
            mine.replace(path)
            if not _claim(path, self.owner).exists():
                first.unlink()  # a claim on one who took over stays, as that one may only be slow
                say(f"{path}: took over the lock of {_named(before)}, which is gone")
                return

    def _refresh(self) -> None:
        if self._problem is not None:
            return
        try:
            owner = read_owner(self._path.parent)
            if owner == self.owner:
                os.utime(self._path)  # no explicit time, so that the file server sets its own
            else:
                self._problem = f"{self._path}: this run's folder was taken over by {_named(owner)}"
        except FileNotFoundError:
            self._problem = f"{self._path} is gone: was the run folder removed?"
        except OSError:
            pass  # the file server may recover

    def _remove_made(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()


def check_not_held(folder: Path, mine: Owner | None = None) -> None:
    """Raise ``InputError`` if a live process of this machine, other than ``mine``, holds the lock."""
    try:
        owner = read_owner(folder)
    except OSError:
        return
    if owner is not None and owner != mine and owner.lives():
        raise _held(folder / LOCK, owner)


def read_owner(folder: Path, name: str = LOCK) -> Owner | None:
    """Read the owner from the lock file of ``folder``; None if its content is not valid (yet). Raises
    ``FileNotFoundError`` if there is no lock."""
    try:
        return Owner(**json.loads((folder / name).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None


def _make(path: Path, owner: Owner) -> bool:
    """Try to create the file and return whether this process did; of concurrent callers only one succeeds."""
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
    """Return once the owner is known to be gone; raise ``InputError`` if it lives."""
    lives = owner.lives() if owner is not None else None
    if lives:
        raise _held(path, owner)
    if lives is False:
        return
    began, first = time.monotonic(), refreshed(path)
    age = now_there(path.parent) - first
    if age < STALE_SECONDS:
        say(f"{path} is held by {_named(owner)}: checking for {STALE_SECONDS - age:.0f} s whether it lives")
    while age + time.monotonic() - began < STALE_SECONDS:
        pause()
        time.sleep(POLL_SECONDS)
        if refreshed(path) != first:
            raise _held(path, owner)


def _claim(path: Path, owner: Owner | None) -> Path:
    """Return the file whose creator may take over from ``owner``, as read from the lock or claim at ``path``.
    Raises ``FileNotFoundError`` if that is gone and was not readable."""
    return path.with_name(f"{LOCK}.after.{owner.nonce if owner else path.stat().st_mtime_ns}")


def _held(path: Path, owner: Owner | None) -> InputError:
    return InputError(
        f"{path.parent} is in use by {_named(owner)}: wait for its end, stop it, or change run.name"
    )


def _named(owner: Owner | None) -> str:
    return str(owner) if owner is not None else "an unknown process"


def refreshed(path: Path) -> float:
    """Return the time of the last refresh on the file system's clock; infinite if the file is gone."""
    try:
        with path.open("rb") as file:  # opening makes a network file system ask its server
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:  # just released, which counts as a change
        return float("inf")


def now_there(folder: Path) -> float:
    """Return the time on the file system's clock."""
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
    """Return the start time of a process of this machine; None if there is none, or it is a zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name, in parentheses, may contain any characters.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
