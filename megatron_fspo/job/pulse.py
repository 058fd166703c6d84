"""The thread with which a rank lives among the others: it beats, watches a neighbour and talks to the store.

A job's key-value store answers one request of a connection at a time, and a machine that lost its power
answers none at all. So one thread per rank has a connection of its own, and who waits for its answers keeps
an eye on the clock. It asks again and again, and never blocks in the store: torch's own blocking wait writes
a warning whenever it times out.

Every rank looks at the next one, whatever either is doing, so a look costs the store two requests per rank
and beat. What counts as silence is what was *seen*: a rank that was stopped or starved for a minute itself
has not seen anybody be silent. A silent rank ends the job whatever the others do: most of them are in a
collective with it, which says nothing until its own, longer time-out, and then not who was missing.

Keys, under a prefix per job: ``beat/<rank>``, ``failed`` and ``stop`` ("-" until there is something to say),
``left``; and those of :mod:`~megatron_fspo.job.control`. The last rank to leave deletes them.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from megatron_fspo.parallel.control import Patience

T = TypeVar("T")

NOTHING = "-"
_LEFT = "\0left"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between two questions whether a key is there
_CLOSING_SECONDS = 10.0


class Beat(NamedTuple):
    """A sign of life."""

    number: int
    host: str
    local_rank: str
    """On its host, as the launcher says; "" without one."""
    process: int
    waits: str
    """What for; "" while it works."""

    @property
    def who(self) -> str:
        local = f"local rank {self.local_rank}, " if self.local_rank else ""
        return f"{self.host}, {local}process {self.process}"


@dataclass(frozen=True)
class _Request:
    """Asked again and again until the answer is not None."""

    ask: Callable[[Store], Any]
    answer: Future[Any]


class Pulse:
    """The thread of one rank.

    Args:
        store: of the job; used by this thread only, from here on.
        rank, size: in the job.
        hosts: whether the store's server is a thread of this process, and ends with it.
        speaks: whether this rank's last words go to stderr; one per machine is enough.
        end: ends the process, at once.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        patience: Patience,
        *,
        hosts: bool = False,
        speaks: bool = True,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self.waits = ""
        """What this rank's main thread waits for."""
        self.stop_here = False
        """This process was asked to stop; a signal handler sets it."""
        self.stop_seen = False
        """Some process was asked to."""
        self.problem: str | None = None
        """Why the job ends."""
        self.turns = 0
        """Grows while the store answers."""
        self._store = store
        self._hosts, self._speaks, self._end = hosts, speaks, end
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._count = 0
        self._me = (socket.gethostname(), os.environ.get("LOCAL_RANK", ""), os.getpid())
        self._neighbour = (rank + 1) % size
        self._seen: Beat | None = None
        self._silent = 0.0
        self._looked = time.monotonic()
        self._leaving = self._told = False
        self._thread = threading.Thread(target=self._main, name="pulse", daemon=True)
        # The interpreter kills threads at its end, which aborts the process if one is inside C++.
        atexit.register(self.close)
        self._thread.start()

    @property
    def who(self) -> str:
        return _name(self.rank, self._sign())

    def until(self, ask: Callable[[Store], T | None]) -> Future[T]:
        """What ``ask`` returns in this thread, once that is not None."""
        answer: Future[T] = Future()
        self._requests.put(_Request(ask, answer))
        return answer

    def fail(self, problem: str) -> None:
        """Have the job end; the first problem of all ranks is the one that is told. Returns soon."""
        if self.problem is not None or not self._thread.is_alive():
            return
        self.until(lambda store: self._post(store, problem))
        deadline = time.monotonic() + _CLOSING_SECONDS
        while self.problem is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._hosts:
            time.sleep(2 * self.patience.beat)  # until all have read it

    def lost(self, problem: str) -> None:
        """Nobody can be heard any more: every machine says so for itself."""
        self._heard(problem)
        if self.rank != 0 and self._speaks and not self._leaving:
            self._tell()

    def close(self) -> None:
        """Leave. After a failure the thread stays, to end a process that does not end."""
        atexit.unregister(self.close)
        if self.problem is not None or not self._thread.is_alive():
            return
        self._leaving = True
        self._requests.put(None)
        self._thread.join(_CLOSING_SECONDS)

    def missing(self, store: Store, ranks: Sequence[int], what: str) -> str:
        """Those of ``ranks`` that do not wait for ``what``, for messages. For the thread."""
        beats = _beats(store, ranks)
        late = [
            _name(rank, beats.get(rank)) for rank in ranks if rank not in beats or beats[rank].waits != what
        ]
        return ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")

    def say(self, store: Store) -> None:
        """Give a sign of life, and what is waited for. For the thread."""
        self._say(self.waits)

    def _main(self) -> None:
        try:
            self._live()
        except Exception as error:  # the store is gone: nobody can be heard any more
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.lost(f"the store through which ranks meet is gone, with the process that had it: {reason}")
        if self.problem is not None and not self._leaving:
            time.sleep(self.patience.grace)
            if self._speaks:
                self._tell()
            self._end(1)

    def _live(self) -> None:
        for key in ("failed", "stop"):
            self._store.compare_set(key, "", NOTHING)
        open_requests: list[_Request] = []
        pause, next_beat = _FIRST_PAUSE, 0.0
        while self.problem is None:
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + self.patience.beat
            open_requests = [request for request in open_requests if not self._answered(request)]
            self.turns += 1
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

    def _answered(self, request: _Request) -> bool:
        if request.answer.cancelled():
            return True
        found = request.ask(self._store)
        if found is None:
            return False
        if request.answer.set_running_or_notify_cancel():
            request.answer.set_result(found)
        return True

    def _beat(self) -> None:
        """Say that this rank lives, and look whether the next does; hear of failures and stops."""
        self._say(self.waits)
        if self.stop_here and not self.stop_seen:
            self._store.compare_set("stop", NOTHING, str(self.rank))
        failed, stop = (text.decode() for text in self._store.multi_get(["failed", "stop"]))
        self.stop_seen = stop != NOTHING
        if failed != NOTHING:
            self._heard(failed)
        elif self.size > 1:
            self._look()

    def _say(self, waits: str) -> None:
        self._count += 1
        self._store.set(f"beat/{self.rank}", json.dumps(self._sign(waits)))

    def _sign(self, waits: str = "") -> Beat:
        return Beat(self._count, *self._me, waits)

    def _look(self) -> None:
        key = f"beat/{self._neighbour}"
        if self._seen is None and not self._store.check([key]):
            return  # who never came is missed by those that meet
        beat = _parse(self._store.get(key))
        now = time.monotonic()
        # No more than two beats: for the rest of a longer time it was us who did not look.
        since, self._looked = min(now - self._looked, 2 * self.patience.beat), now
        if beat.waits == _LEFT or self._seen is None or beat.number != self._seen.number:
            self._silent = 0.0
        else:
            self._silent += since
        self._seen = beat
        if self._silent > self.patience.silence:
            self._report(beat)

    def _report(self, silent: Beat) -> None:
        """The neighbour is silent: end the job."""
        waiting = [
            f", while {_name(rank, beat)} waited for {beat.waits}"
            for rank, beat in _beats(self._store, range(self.size)).items()
            if rank != self._neighbour and beat.waits not in ("", _LEFT)
        ]
        doing = f", last seen waiting for {silent.waits}" if silent.waits else ""
        problem = (
            f"{_name(self._neighbour, silent)} was not heard of for {self._silent:.0f} s "
            f"(parallel.silence_seconds){doing}{waiting[0] if waiting else ''}"
        )
        # The first rank says it in its own error, unless it is in a collective: then nobody else would.
        if self._post(self._store, problem) and (self.rank != 0 or not self.waits):
            self._tell()

    def _post(self, store: Store, problem: str) -> bool:
        """Whether this was the first problem."""
        told = store.compare_set("failed", NOTHING, problem).decode()
        self._heard(told)
        return told == problem

    def _heard(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem

    def _leave(self) -> None:
        self._say(_LEFT)
        left = self._store.add("left", 1)
        if left == self.size:
            for key in ["failed", "stop", "left", *(f"beat/{rank}" for rank in range(self.size))]:
                self._store.delete_key(key)
        elif self._hosts:  # the others' last requests need it
            deadline = time.monotonic() + _CLOSING_SECONDS / 2
            while self._store.check(["left"]) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            print(f"megatron-fspo: rank {self.rank}: {self.problem}", file=sys.stderr, flush=True)


def _beats(store: Store, ranks: Sequence[int]) -> dict[int, Beat]:
    """The newest sign of life of every rank that ever gave one."""
    keys = [f"beat/{rank}" for rank in ranks]
    if store.check(keys):  # all of them
        texts = store.multi_get(keys)
        return {rank: _parse(text) for rank, text in zip(ranks, texts, strict=True)}
    came = [(rank, key) for rank, key in zip(ranks, keys, strict=True) if store.check([key])]
    return {rank: _parse(store.get(key)) for rank, key in came}


def _name(rank: int, beat: Beat | None) -> str:
    return f"rank {rank}" + (f" ({beat.who})" if beat else "")


def _parse(text: bytes) -> Beat:
    return Beat(*json.loads(text))
