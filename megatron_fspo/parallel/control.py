"""Long waits of ranks for each other, outside of collectives.

Collectives have a short time-out, so that a hanging one is detected early. Servers, graders and disks may
take longer. So :meth:`Control.barrier` stands before the first collective after such work, and the first
rank's instructions come by :meth:`Control.broadcast` and ``receive``. A rank that waits like this learns
within seconds if another rank failed or disappeared, or if the job should stop.

This is the control of a job of one process, which never waits for other ranks. That of several processes is
:class:`~megatron_fspo.job.control.JobControl`. Every rank calls the same methods in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_fspo.errors import StopRequested, TrainingError

SLICE = 0.5
"""Seconds between two checks of a waiting rank for failures of others."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits, in seconds."""

    wait: float = 4 * 3600.0
    """Longest wait for servers, grades and disks, and for ranks that wait for these."""
    silence: float = 40.0
    """Longest time without a heartbeat of a rank."""
    grace: float = 15.0
    """Time that a process has to end by itself after the job failed, before it is killed."""

    @property
    def beat(self) -> float:
        """Interval of heartbeats."""
        return min(2.0, self.silence / 8)


@dataclass(frozen=True)
class Wait:
    """A wait in progress; call :meth:`check` regularly."""

    control: Control
    what: str
    seconds: float | None
    stops: bool
    began: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Call this about every :data:`SLICE` seconds.

        Raises:
            TrainingError: another rank failed or disappeared, or the wait exceeds its time limit.
            StopRequested: a stop was requested, and this wait may end early.
        """
        self.control.check()
        if self.stops and self.control.stop_requested:
            raise StopRequested(f"a stop was requested during the wait for {self.what}")
        seconds, key = self.seconds, ""
        if seconds is None:
            seconds, key = self.control.timeouts.wait, " (parallel.wait_seconds)"
        if time.monotonic() - self.began > seconds:
            raise TrainingError(f"waited {seconds:g} s for {self.what}{key}")


class Control:
    """The control of a job of one process."""

    def __init__(self, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self.waits = ""
        """What this rank waits for, outside of collectives; "" while it works."""
        self._stop_here = False

    def broadcast(self, message: str) -> None:
        """On the first rank, send the others a short instruction. Returns when all have received it, so that
        a collective may follow. Raises ``TrainingError`` as :meth:`barrier`."""

    def receive(self, what: str) -> str:
        """Wait, on the other ranks, for the first rank's next instruction and return it; ``what`` names
        the wait in messages. Raises ``TrainingError`` as :meth:`barrier`."""
        raise RuntimeError("receive() in a job of one process, which has no other rank")

    def barrier(self, what: str, ranks: Sequence[int] | None = None, *, seconds: float | None = None) -> bool:
        """Wait until all ranks call this, before the first collective after work of different duration.

        Args:
            what: what is waited for, for messages; the same on all ranks.
            ranks: the ranks that wait, the same on all of them; default: all.
            seconds: time limit; default: ``parallel.wait_seconds``.

        Returns:
            whether a stop was requested before all ranks arrived; the same on all of them.

        Raises:
            TrainingError: another rank failed or disappeared, or ranks, which it names, are not in time.
        """
        return self.stop_requested

    @contextmanager
    def waiting(self, what: str, *, seconds: float | None = None, stops: bool = False) -> Iterator[Wait]:
        """Context manager to wait for something else, such as a server: poll, and call :meth:`Wait.check`.
        ``what`` names it in messages; ``seconds`` is the time limit, by default ``parallel.wait_seconds``;
        with ``stops``, a requested stop raises ``StopRequested``."""
        before, self.waits = self.waits, what
        try:
            yield Wait(self, what, seconds, stops)
        finally:
            self.waits = before

    def check(self) -> None:
        """Raise ``TrainingError`` if another rank failed or disappeared, or the store does not answer."""

    def request_stop(self) -> None:
        """Request the whole job to stop. Signal handlers may call this."""
        self._stop_here = True

    @property
    def stop_requested(self) -> bool:
        """True once a stop was requested on any rank. Ranks learn of it at different times: for a common
        decision use the result of :meth:`barrier`, or the first rank's instruction."""
        return self._stop_here

    def fail(self, error: BaseException) -> None:
        """Send the others the error that ends the job: it ends their waits, and after a grace period their
        processes."""

    def close(self) -> None:
        """Leave the job."""
