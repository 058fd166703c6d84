"""Waiting through the job's store, watched by its heartbeat (:mod:`~megatron_fspo.job.pulse`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.pulse import NOTHING, Pulse
from megatron_fspo.parallel.control import SLICE, Control, Wait

T = TypeVar("T")

_MESSAGE_CHARACTERS = 4000


class JobControl(Control):
    """Of a job of several ranks; made once, by :mod:`megatron_fspo.mcore.startup`."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(pulse.patience)
        self._pulse = pulse
        self._words = 0
        self._meetings: dict[str, int] = {}
        self._turns, self._quiet, self._looked = 0, 0.0, 0.0

    def tell(self, word: str) -> None:
        key = self._next_word()

        def say(store: Store) -> bool:
            store.set(key, word)
            return True

        self._pulse.until(say)
        with self.waiting(f"all ranks to hear {word!r}") as wait:
            self._result(self._pulse.until(_getting(f"{key}/all")), wait)
        self._forget(key, f"{key}/heard", f"{key}/all")

    def hear(self, what: str) -> str:
        pulse = self._pulse
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
        pulse = self._pulse
        if ranks is not None and len(ranks) == 1:
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
        with super().waiting(what, seconds=seconds, stops=stops) as wait:
            before, self._pulse.waits = self._pulse.waits, what
            self._turns, self._quiet, self._looked = self._pulse.turns, 0.0, time.monotonic()
            try:
                yield wait
            finally:
                self._pulse.waits = before

    def check(self) -> None:
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
        super().request_stop()
        self._pulse.stop_here = True

    @property
    def stop_requested(self) -> bool:
        return super().stop_requested or self._pulse.stop_seen

    def fail(self, error: BaseException) -> None:
        if self._pulse.problem is not None:
            return
        kind = "" if isinstance(error, InputError | TrainingError) else f"{type(error).__name__}: "
        self._pulse.fail(f"{self._pulse.who}: {kind}{error}"[:_MESSAGE_CHARACTERS])

    def close(self) -> None:
        self._pulse.close()

    def _next_word(self) -> str:
        self._words += 1
        return f"word/{self._words}"

    def _forget(self, *keys: str) -> None:
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
