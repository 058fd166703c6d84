"""Long waits of ranks for each other: outside of collectives.

A collective has a short time-out, because whoever hangs in one is lost. Servers, graders and disks take as
long as they take. So before the first collective after such a time all ranks :meth:`Control.meet`, and ranks
that do what the first one says :meth:`Control.hear` it. Who waits this way learns within seconds that another
rank failed, or is gone, and whether the job was asked to stop.

This is the job of one process, which waits for nobody; :class:`~megatron_fspo.job.control.JobControl` is of
several. Every rank calls the same methods in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_fspo.errors import StopRequested, TrainingError

SLICE = 0.5
"""Seconds between two looks of a waiting rank at what became of the others."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limits of waits, in seconds."""

    wait: float = 4 * 3600.0
    """Longest wait for servers, grades, disks and the ranks that are busy with them."""
    silence: float = 40.0
    """Longest time without a sign of life of a rank."""
    grace: float = 15.0
    """Time between the news that the job has failed, and the end of a process that did not end by itself."""

    @property
    def beat(self) -> float:
        """Time between two signs of life."""
        return min(2.0, self.silence / 8)


@dataclass(frozen=True)
class Wait:
    """A wait under way: what to ask while it lasts."""

    control: Control
    what: str
    seconds: float | None
    stops: bool
    began: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Call it every :data:`SLICE` or so.

        Raises:
            TrainingError: another rank failed or is gone, or this takes longer than it may.
            StopRequested: a stop was requested, and this wait may end early.
        """
        self.control.check()
        if self.stops and self.control.stop_requested:
            raise StopRequested(f"a stop was requested during the wait for {self.what}")
        seconds, key = self.seconds, ""
        if seconds is None:
            seconds, key = self.control.patience.wait, " (parallel.wait_seconds)"
        if time.monotonic() - self.began > seconds:
            raise TrainingError(f"waited {seconds:g} s for {self.what}{key}")


class Control:
    """The control of a job of one process, which waits for nobody."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.waits = ""
        """The thing this rank waits for, outside of collectives; "" while it works."""
        self._stop_here = False

    def tell(self, word: str) -> None:
        """Say a few words, on the first rank: what to do together next. Returns when all others have heard
        it, so that a collective may follow. Raises ``TrainingError`` as :meth:`meet`."""

    def hear(self, what: str) -> str:
        """Return, on the other ranks, the next word of the first one; messages say ``what`` is waited for.
        Raises ``TrainingError`` as :meth:`meet`."""
        raise RuntimeError("hear() in a job of one process: nobody tells")

    def meet(self, what: str, ranks: Sequence[int] | None = None, *, seconds: float | None = None) -> bool:
        """Wait until all ranks are here: before the first collective after what may take one longer than
        another.

        Args:
            what: was done until here, for messages; the same on all.
            ranks: of the job, the same on all of them; default all.
            seconds: how long at most; default ``parallel.wait_seconds``.

        Returns:
            whether the job was asked to stop before all were here: the same on all of them.

        Raises:
            TrainingError: another rank failed or is gone, or some did not come in time. Names them.
        """
        return self.stop_requested

    @contextmanager
    def waiting(self, what: str, *, seconds: float | None = None, stops: bool = False) -> Iterator[Wait]:
        """A wait of another kind, for a server perhaps: poll, and call :meth:`Wait.check` meanwhile. It may
        last ``seconds``, by default ``parallel.wait_seconds``; with ``stops`` a request to stop ends it, as
        StopRequested. Messages say ``what`` is waited for."""
        before, self.waits = self.waits, what
        try:
            yield Wait(self, what, seconds, stops)
        finally:
            self.waits = before

    def check(self) -> None:
        """Do nothing while the job is well.

        Raises:
            TrainingError: another rank failed or is gone; or the store does not answer.
        """

    def request_stop(self) -> None:
        """Ask the whole job to stop; a signal handler may."""
        self._stop_here = True

    @property
    def stop_requested(self) -> bool:
        """True once some rank was asked to stop. Ranks learn of it within seconds, not at once: they decide
        by what :meth:`meet` returns, or by what the first rank tells."""
        return self._stop_here

    def fail(self, error: BaseException) -> None:
        """Tell the others why the job ends: their waits end with it, and after a grace period what is left of
        them."""

    def close(self) -> None:
        """Leave the job."""
