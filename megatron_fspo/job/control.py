"""Waiting through the job's key-value store, and the heartbeat with which ranks monitor each other.

The store handles one request per connection at a time, and a machine without power never answers. So one
thread per rank, the heartbeat, has its own connection, and callers wait for its answers with a time limit.
It polls and never blocks in the store, because torch's blocking wait logs a warning at each time-out.

Every rank monitors the next rank, at two requests per rank and beat. A silent rank ends the job: most other
ranks hang in a collective with it, which would only fail after a longer time-out, without naming the rank.

Keys, under a prefix per job: ``beat/<rank>``, ``failed`` and ``stop`` ("-" until set), ``left``,
``message/<number>`` and ``meet/<ranks>/<number>``. The last rank to leave deletes them.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.parallel.control import SLICE, Control, Timeouts, Wait

T = TypeVar("T")

_NOTHING = "-"
_LEFT = "\0left"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between two polls
_CLOSING_SECONDS = 10.0
_MESSAGE_CHARACTERS = 4000


class Beat(NamedTuple):
    """A heartbeat of one rank, as stored."""

    number: int
    host: str
    local_rank: str
    """``LOCAL_RANK``; "" if the launcher does not set it."""
    process: int
    waits: str
    """What the rank waits for; "" while it works."""

    def name(self, rank: int) -> str:
        """Return rank, host, local rank and process, for messages."""
        local = f"local rank {self.local_rank}, " if self.local_rank else ""
        return f"rank {rank} ({self.host}, {local}process {self.process})"


class HeartbeatTimer:
    """Counts the seconds for which an observed state has not changed.

    At most two beats count between two looks, so a process that was itself stopped or starved for a minute
    does not report others as silent.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._most = 2 * timeouts.beat
        self._looked = time.monotonic()
        self._state: object = None
        self.seconds = 0.0

    def look(self, state: object) -> float:
        """Return the seconds for which this state has been observed."""
        now = time.monotonic()
        self.seconds = self.seconds + min(now - self._looked, self._most) if state == self._state else 0.0
        self._looked, self._state = now, state
        return self.seconds


class JobControl(Control):
    """The control of a job of several ranks; made once, by :mod:`megatron_fspo.mcore.machine.startup`.

    Args:
        store: the job's store; from now on, only the heartbeat may use it.
        rank: rank of this process.
        size: number of ranks.
        timeouts: time limits.
        hosts: whether the store's server is a thread of this process.
        speaks: whether this rank prints the job's failure to stderr; one rank per machine is enough.
        end: ends the process immediately.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeouts: Timeouts,
        *,
        hosts: bool = False,
        speaks: bool = True,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(timeouts)
        self.problem: str | None = None
        """Why the job ends; None while it runs."""
        self._store, self._rank, self._size = store, rank, size
        self._hosts, self._speaks, self._end = hosts, speaks, end
        self._messages = 0
        self._meetings: dict[str, int] = {}
        self._stop_seen = False  # a stop was requested on some rank
        self._rounds = 0  # of the heartbeat's loop: grows while the store answers
        self._store_silence = HeartbeatTimer(timeouts)
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._beat = Beat(0, socket.gethostname(), os.environ.get("LOCAL_RANK", ""), os.getpid(), "")
        self._neighbour, self._neighbour_came = (rank + 1) % size, False
        self._neighbour_silence = HeartbeatTimer(timeouts)
        self._leaving = self._printed = False
        self._thread = threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True)
        # At exit the interpreter kills threads, which aborts the process if one is inside C++.
        atexit.register(self.close)
        self._thread.start()

    def broadcast(self, message: str) -> None:
        self._messages += 1
        key, store = f"message/{self._messages}", self._store

        def say() -> bool:
            store.set(key, message)
            return True

        self._until(say)
        with self.waiting(f"all ranks to receive {message!r}") as wait:
            self._result(self._until(lambda: store.check([f"{key}/all"]) or None), wait)
        self._until(lambda: self._delete(key, f"{key}/received", f"{key}/all"))

    def receive(self, what: str) -> str:
        self._messages += 1
        key, store = f"message/{self._messages}", self._store

        def ask() -> str | None:
            if not store.check([key]):
                return None
            message = store.get(key).decode()
            if store.add(f"{key}/received", 1) == self._size - 1:
                store.set(f"{key}/all", "1")
            return message

        with self.waiting(what) as wait:
            return self._result(self._until(ask), wait)

    def barrier(self, what: str, ranks: Sequence[int] | None = None, *, seconds: float | None = None) -> bool:
        if ranks is not None and len(ranks) == 1:
            return self.stop_requested
        ranks, store = range(self._size) if ranks is None else ranks, self._store
        who = "all" if len(ranks) == self._size else ",".join(map(str, ranks))
        number = self._meetings[who] = self._meetings.get(who, 0) + 1
        key = f"meet/{who}/{number}"

        def arrive() -> bool:
            if self._stop_here:
                store.compare_set("stop", _NOTHING, str(self._rank))
            self._say(self.waits)
            if store.add(key, 1) == len(ranks):
                store.set(f"{key}/all", store.get("stop").decode())
            return True

        def leave() -> str | None:
            if not store.check([f"{key}/all"]):
                return None
            stop = store.get(f"{key}/all").decode()
            if store.add(f"{key}/left", 1) == len(ranks):
                self._delete(key, f"{key}/all", f"{key}/left")
            return stop

        # _missing recognises ranks that arrived by the wait in their heartbeats.
        with self.waiting(what, seconds=seconds) as wait:
            self._until(arrive)
            try:
                return self._result(self._until(leave), wait) != _NOTHING
            except TrainingError as error:
                if self.problem is not None:
                    raise
                late = self._result(self._until(lambda: self._missing(ranks, what)))
                self.fail(TrainingError(f"{error}; missing: {late}"))
                raise TrainingError(self.problem) from None  # the same on all of them

    @contextmanager
    def waiting(self, what: str, *, seconds: float | None = None, stops: bool = False) -> Iterator[Wait]:
        with super().waiting(what, seconds=seconds, stops=stops) as wait:
            self._store_silence = HeartbeatTimer(self.timeouts)
            yield wait

    def check(self) -> None:
        if self.problem is None:
            silence = self._store_silence.look(self._rounds)
            if silence <= self.timeouts.silence:
                return
            self._lose_store(f"has not answered for {silence:.0f} s: is the machine of rank 0 down?")
        raise TrainingError(self.problem)

    @property
    def stop_requested(self) -> bool:
        return self._stop_here or self._stop_seen

    def fail(self, error: BaseException) -> None:
        if self.problem is not None or not self._thread.is_alive():
            return
        kind = "" if isinstance(error, InputError | TrainingError) else f"{type(error).__name__}: "
        problem = f"{self._beat.name(self._rank)}: {kind}{error}"[:_MESSAGE_CHARACTERS]
        self._until(lambda: self._post(problem))
        deadline = time.monotonic() + _CLOSING_SECONDS
        while self.problem is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._hosts:
            time.sleep(2 * self.timeouts.beat)  # until all ranks have read the problem

    def close(self) -> None:
        # After a failure the thread continues, to end the process if it hangs.
        atexit.unregister(self.close)
        if self.problem is not None or not self._thread.is_alive():
            return
        self._leaving = True
        self._requests.put(None)
        self._thread.join(_CLOSING_SECONDS)

    def _until(self, ask: Callable[[], T | None]) -> Future[T]:
        """Have the heartbeat call ``ask`` repeatedly; the result is the first that is not None."""
        answer: Future[T] = Future()
        self._requests.put((ask, answer))
        return answer

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

    def _lose_store(self, why: str) -> None:
        """Set the problem; each machine prints it for itself, since ranks can no longer reach each other."""
        self.problem = self.problem or f"the store through which ranks meet {why}"
        if self._rank != 0 and self._speaks and not self._leaving:
            self._print_problem()

    # The methods below run in the heartbeat's thread.

    def _heartbeat(self) -> None:
        try:
            self._live()
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._lose_store(f"is gone, because the process that hosted it ended: {reason}")
        if self.problem is not None and not self._leaving:
            time.sleep(self.timeouts.grace)
            if self._speaks:
                self._print_problem()
            self._end(1)

    def _live(self) -> None:
        for key in ("failed", "stop"):
            self._store.compare_set(key, "", _NOTHING)
        open_requests: list[tuple[Callable[[], Any], Future[Any]]] = []
        pause, next_beat = _FIRST_PAUSE, 0.0
        while self.problem is None:
            if time.monotonic() >= next_beat:
                self._beat_and_look()
                next_beat = time.monotonic() + self.timeouts.beat
            open_requests = [request for request in open_requests if not self._answered(*request)]
            self._rounds += 1
            wait = next_beat - time.monotonic()
            if open_requests:
                wait = min(wait, pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                request = self._requests.get(timeout=max(wait, 0))
            except Empty:
                continue
            if request is None:
                self._leave()
                return
            open_requests.append(request)
            pause = _FIRST_PAUSE

    def _answered(self, ask: Callable[[], Any], answer: Future[Any]) -> bool:
        if answer.cancelled():
            return True
        result = ask()
        if result is not None and answer.set_running_or_notify_cancel():
            answer.set_result(result)
        return result is not None

    def _beat_and_look(self) -> None:
        """Post this rank's heartbeat, check the next rank's, and read failures and stop requests."""
        self._say(self.waits)
        if self._stop_here and not self._stop_seen:
            self._store.compare_set("stop", _NOTHING, str(self._rank))
        failed, stop = (text.decode() for text in self._store.multi_get(["failed", "stop"]))
        self._stop_seen = stop != _NOTHING
        if failed != _NOTHING:
            self.problem = self.problem or failed
        elif self._size > 1:
            key = f"beat/{self._neighbour}"
            if not self._neighbour_came:  # meet() reports ranks that never come
                self._neighbour_came = self._store.check([key])
                return
            beat = Beat(*json.loads(self._store.get(key)))
            if beat.waits != _LEFT and self._neighbour_silence.look(beat.number) > self.timeouts.silence:
                self._report(beat)

    def _say(self, waits: str) -> None:
        self._beat = self._beat._replace(number=self._beat.number + 1, waits=waits)
        self._store.set(f"beat/{self._rank}", json.dumps(self._beat))

    def _report(self, silent: Beat) -> None:
        """End the job because the next rank is silent."""
        waiting = [
            f", while {beat.name(rank)} waited for {beat.waits}"
            for rank, beat in self._beats(range(self._size)).items()
            if rank != self._neighbour and beat.waits not in ("", _LEFT)
        ]
        doing = f", last seen waiting for {silent.waits}" if silent.waits else ""
        problem = (
            f"{silent.name(self._neighbour)} sent no heartbeat for {self._neighbour_silence.seconds:.0f} s "
            f"(parallel.silence_seconds){doing}{waiting[0] if waiting else ''}"
        )
        # Not on rank 0 in a wait, which raises an error with the problem.
        if self._post(problem) and (self._rank != 0 or not self.waits):
            self._print_problem()

    def _post(self, problem: str) -> bool:
        """Publish a problem; return whether it is the first of all ranks, the one that is reported."""
        first = self._store.compare_set("failed", _NOTHING, problem).decode()
        self.problem = self.problem or first
        return first == problem

    def _missing(self, ranks: Sequence[int], what: str) -> str:
        """Name those of ``ranks`` that do not wait for ``what``."""
        beats = self._beats(ranks)
        late = [rank for rank in ranks if rank not in beats or beats[rank].waits != what]
        return shortened([beats[rank].name(rank) if rank in beats else f"rank {rank}" for rank in late])

    def _beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """Return the newest heartbeat of each rank that has sent one."""
        texts = read_keys(self._store, {rank: f"beat/{rank}" for rank in ranks})
        return {rank: Beat(*json.loads(text)) for rank, text in texts.items()}

    def _leave(self) -> None:
        self._say(_LEFT)
        if self._store.add("left", 1) == self._size:
            self._delete("failed", "stop", "left", *(f"beat/{rank}" for rank in range(self._size)))
        elif self._hosts:  # other ranks still need the store for their last requests
            deadline = time.monotonic() + _CLOSING_SECONDS / 2
            while self._store.check(["left"]) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _delete(self, *keys: str) -> bool:
        for key in keys:
            self._store.delete_key(key)
        return True

    def _print_problem(self) -> None:
        if not self._printed:
            self._printed = True
            print(f"megatron-fspo: rank {self._rank}: {self.problem}", file=sys.stderr, flush=True)


def read_keys(store: Store, keys: dict[int, str]) -> dict[int, bytes]:
    """Return rank → value for those of the ranks' keys that are in the store, without waiting."""
    if not store.check(list(keys.values())):  # if all are there, two requests are enough
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def shortened(names: Sequence[str]) -> str:
    """Join the first five names with commas, and append how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
