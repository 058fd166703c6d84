"""How ranks wait for each other where a wait may be long: outside of collectives, through the job's store.

A collective has a short time-out, because whoever hangs in one is lost. Servers, graders and disks take as
long as they take. So before the first collective after such a time all ranks :meth:`Control.meet`, and ranks
that do what the first one says :meth:`Control.hear` it. Who waits this way learns within seconds that another
rank failed, or is gone (see :mod:`~megatron_fspo.parallel.pulse`), and whether the job was asked to stop.

Every rank calls the same methods in the same order. A job of one process pays nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from megatron_fspo.errors import InputError, StopRequested, TrainingError
from megatron_fspo.parallel.pulse import NOTHING, Patience, Pulse

T = TypeVar("T")

SLICE = 0.5
"""Seconds between two looks of a waiting rank at what became of the others."""
_MESSAGE_CHARACTERS = 4000


class Wait:
    """A wait under way: what to ask while it lasts."""

    def __init__(self, control: Control, what: str, *, seconds: float | None, stops: bool) -> None:
        self._control = control
        self._what = what
        self._seconds = seconds or control.patience.wait
        self._key = "" if seconds else " (parallel.wait_seconds)"
        self._stops = stops
        self._began = time.monotonic()

    def check(self) -> None:
        """Call it every :data:`SLICE` or so.

        Raises:
            TrainingError: another rank failed or is gone, or this takes longer than it may.
            StopRequested: a stop was requested, and this wait may end early.
        """
        self._control.check()
        if self._stops and self._control.stop_requested:
            raise StopRequested(f"a stop was requested during the wait for {self._what}")
        if time.monotonic() - self._began > self._seconds:
            raise TrainingError(f"waited {self._seconds:g} s for {self._what}{self._key}")


class Control:
    """Made once per job, by :mod:`megatron_fspo.mcore.startup`.

    Args:
        pulse: None: a job of one process.
        patience: of a job of one process; else the pulse's.
    """

    def __init__(self, pulse: Pulse | None = None, patience: Patience | None = None) -> None:
        self._pulse = pulse
        self.patience = pulse.patience if pulse else patience or Patience()
        self._words = 0
        self._meetings: dict[str, int] = {}
        self._stop_here = False
        self._waits = ""
        self._turns, self._quiet, self._looked = 0, 0.0, 0.0

    def tell(self, word: str) -> None:
        """On the first rank: say what to do together next; returns when all others have heard it, so that a
        collective may follow.

        Args:
            word: a few words; what is long goes through a collective afterwards.

        Raises:
            TrainingError: as :meth:`meet`.
        """
        if self._pulse is None:
            return
        key = self._next_word()

        def say(store: Store) -> bool:
            store.set(key, word)
            return True

        self._pulse.until(say)
        with self.waiting(f"all ranks to hear {word!r}") as wait:
            self._result(self._pulse.until(_getting(f"{key}/all")), wait)
        self._forget(key, f"{key}/heard", f"{key}/all")

    def hear(self, what: str) -> str:
        """On the other ranks: the next word of the first one.

        Args:
            what: is waited for, for messages.

        Raises:
            TrainingError: as :meth:`meet`.
        """
        pulse = self._pulse
        if pulse is None:
            raise RuntimeError("hear() in a job of one process: nobody tells")
        key = self._next_word()

        def ask(store: Store) -> str | None:
            if not store.check([key]):
                return None
            word = store.get(key).decode()
            if store.add(f"{key}/heard", 1) == pulse.size - 1:
                store.set(f"{key}/all", "1")
            return word

        with self.waiting(what) as wait:
            return self._result(pulse.until(ask), wait)

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
        pulse = self._pulse
        if pulse is None or (ranks is not None and len(ranks) == 1):
            return self.stop_requested
        ranks = range(pulse.size) if ranks is None else ranks
        place = "all" if len(ranks) == pulse.size else ",".join(map(str, ranks))
        number = self._meetings[place] = self._meetings.get(place, 0) + 1
        key = f"meet/{place}/{number}"

        def arrive(store: Store) -> bool:
            if pulse.stop_here:
                store.compare_set("stop", NOTHING, str(pulse.rank))
            pulse.say(store)
            if store.add(key, 1) == len(ranks):
                store.set(f"{key}/all", store.get("stop").decode())
            return True

        def leave(store: Store) -> str | None:
            if not store.check([f"{key}/all"]):
                return None
            stop = store.get(f"{key}/all").decode()
            if store.add(f"{key}/left", 1) == len(ranks):
                for old in (key, f"{key}/all", f"{key}/left"):
                    store.delete_key(old)
            return stop

        # Whoever waits here shows it, so that those it waits for can be told from those that came.
        with self.waiting(what, seconds=seconds) as wait:
            pulse.until(arrive)
            try:
                return self._result(pulse.until(leave), wait) != NOTHING
            except TrainingError as error:
                if pulse.problem is not None:
                    raise
                late = self._result(pulse.until(lambda store: pulse.missing(store, ranks, what)))
                self.fail(TrainingError(f"{error}; not there: {late}"))
                raise TrainingError(pulse.problem) from None  # the same on all of them

    @contextmanager
    def waiting(self, what: str, *, seconds: float | None = None, stops: bool = False) -> Iterator[Wait]:
        """A wait of another kind, for a server perhaps: poll, and call :meth:`Wait.check` meanwhile.

        Args:
            what: is waited for, for messages.
            seconds: how long at most; default ``parallel.wait_seconds``.
            stops: whether a request to stop ends it, as StopRequested.
        """
        wait = Wait(self, what, seconds=seconds, stops=stops)
        if self._pulse is None:
            before, self._waits = self._waits, what
            try:
                yield wait
            finally:
                self._waits = before
            return
        before, self._pulse.waits = self._pulse.waits, what
        self._turns, self._quiet, self._looked = self._pulse.turns, 0.0, time.monotonic()
        try:
            yield wait
        finally:
            self._pulse.waits = before

    @property
    def waits(self) -> str:
        """What this rank waits for, outside of collectives; "" while it works."""
        return self._waits if self._pulse is None else self._pulse.waits

    def check(self) -> None:
        """Nothing, while the job is well.

        Raises:
            TrainingError: another rank failed or is gone; or the store does not answer.
        """
        if self._pulse is None:
            return
        if self._pulse.problem is not None:
            raise TrainingError(self._pulse.problem)
        now = time.monotonic()
        # Like a silent rank: only what was seen counts.
        since, self._looked = min(now - self._looked, 2 * self.patience.beat), now
        self._quiet = self._quiet + since if self._pulse.turns == self._turns else 0.0
        self._turns = self._pulse.turns
        if self._quiet > self.patience.silence:
            self._pulse.lost(
                f"the store through which ranks meet has not answered for {self._quiet:.0f} s: is the first "
                "machine gone?"
            )
            raise TrainingError(self._pulse.problem)

    def request_stop(self) -> None:
        """Ask the whole job to stop; a signal handler may."""
        self._stop_here = True
        if self._pulse is not None:
            self._pulse.stop_here = True

    @property
    def stop_requested(self) -> bool:
        """Whether some rank was asked to stop. Ranks learn of it within seconds, not at once: they decide by
        what :meth:`meet` returns, or by what the first rank tells."""
        return self._stop_here or (self._pulse is not None and self._pulse.stop_seen)

    def fail(self, error: BaseException) -> None:
        """Tell the others why the job ends: their waits end with it, and after a grace period what is left of
        them."""
        if self._pulse is None or self._pulse.problem is not None:
            return
        kind = "" if isinstance(error, InputError | TrainingError) else f"{type(error).__name__}: "
        self._pulse.fail(f"{self._pulse.who}: {kind}{error}"[:_MESSAGE_CHARACTERS])

    def close(self) -> None:
        """Leave the job."""
        if self._pulse is not None:
            self._pulse.close()

    def _next_word(self) -> str:
        self._words += 1
        return f"word/{self._words}"

    def _forget(self, *keys: str) -> None:
        assert self._pulse is not None
        self._pulse.until(lambda store: [store.delete_key(key) for key in keys])

    def _result(self, answer: Future[T], wait: Wait | None = None) -> T:
        while True:
            try:
                return answer.result(timeout=SLICE)
            except TimeoutError:
                pass
            try:
                wait.check() if wait else self.check()
            except TrainingError:
                answer.cancel()
                raise


def _getting(key: str) -> Callable[[Store], str | None]:
    return lambda store: store.get(key).decode() if store.check([key]) else None
