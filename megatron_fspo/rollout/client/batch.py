"""What the loop's thread and the trainer's tell each other while completions are under way."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.engine import Arrived, Progress
from megatron_fspo.types import Completion


class Batch:
    """Completions under way, and how many are done, on the first rank."""

    work: Future[list[Completion]]

    def __init__(self, arrived: Arrived | None) -> None:
        self._arrived = arrived
        self._lock = threading.Lock()
        self._unreported = 0
        self._progress: Progress | None = None

    def arrive(self, number: int, completion: Completion) -> None:
        """One more is done; called in the thread of the loop."""
        if self._arrived is not None:
            self._arrived(number, completion)
        with self._lock:
            self._unreported += 1
            self._report()

    def report_to(self, progress: Progress | None) -> None:
        """From here on tell ``progress``, also of what is done already."""
        with self._lock:
            self._progress = progress
            self._report()

    def _report(self) -> None:
        if self._progress is not None and self._unreported:
            self._progress(self._unreported)
            self._unreported = 0


@dataclass(frozen=True)
class Returned:
    """A server that came back, and waits for weights."""

    server: Server
    admitted: asyncio.Future[bool]

    def answer(self, admitted: bool) -> None:
        def tell() -> None:
            if not self.admitted.done():  # else the batch failed meanwhile, and cancelled its probes
                self.admitted.set_result(admitted)

        self.admitted.get_loop().call_soon_threadsafe(tell)
