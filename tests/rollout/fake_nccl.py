"""A group in NCCL's place, among threads, with what NCCL does when a member is lost: nothing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, ClassVar

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

WORKER_SECONDS = 3.0
"""A worker gives up after this, whatever it is given: nobody tells it of an end at the other members."""


class Group:
    """A broadcast is queued on the stream of a member, and done when all members have queued it."""

    made: ClassVar[list[Group]] = []

    def __init__(self, store: TCPStore, rank: int, size: int, timeout: timedelta, address: str) -> None:
        self.rank, self.size, self.port = rank, size, store.port
        self.queued: list[Tensor] = []
        self.aborted = False
        Group.made.append(self)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        self.queued += tensors
        return Work(self, len(self.queued) - 1)

    def abort(self) -> None:
        self.aborted = True

    def synchronize(self, seconds: float) -> bool:
        """Wait for the stream, as all does that comes after a broadcast; False: it hangs."""
        end = time.monotonic() + seconds
        while not all(Work(self, number).is_completed() for number in range(len(self.queued))):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


class Work:
    """Broadcast ``number`` at one member."""

    def __init__(self, group: Group, number: int) -> None:
        self._group, self._number = group, number

    def is_completed(self) -> bool:
        return self._group.aborted or len(self._joined()) == self._group.size

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Without a limit only the stream waits; with one the thread, and at its end this member aborts."""
        group, limit = self._group, timeout.total_seconds()
        end = time.monotonic() + (limit if group.rank == 0 else WORKER_SECONDS)
        while limit and not self.is_completed():
            if time.monotonic() > end:
                group.abort()
                raise RuntimeError("Work timed out in blocking wait.")
            time.sleep(0.001)
        if group.rank and not group.aborted:
            group.queued[self._number].copy_(self._joined()[0].queued[self._number])
        return True

    def _joined(self) -> dict[int, Group]:
        """By rank, those that have queued it."""
        together = (group for group in Group.made if group.port == self._group.port)
        return {group.rank: group for group in together if len(group.queued) > self._number}
