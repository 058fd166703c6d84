"""What every reward of a run is to the grader, whatever does its work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from megatron_fspo.rewards.verdict import Failure, Request

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One reward's verdict on one response."""

    value: float
    answer: str | None = None
    """In the form that equal answers share; None where the reward knows of none."""
    timed_out: bool = False
    """The verdict is 0 because a worker was killed: over its time, its CPU time or its memory."""
    parsed: bool = True
    """An answer was found, and could be read."""
    tier: int = 0
    """Of ``math``: 1 without algebra, 2 with it."""


Answer = Outcome | Failure | Future[Outcome | Failure]
"""A verdict, or one to come."""


class Part(Protocol):
    """One reward of a run."""

    name: str

    def grade(self, request: Request) -> Answer:
        """The verdict. Does not wait for it; any thread may ask."""

    def close(self) -> None:
        """End what it started."""


def after(work: Future[T], then: Callable[[Future[T]], Outcome | Failure]) -> Future[Outcome | Failure]:
    """What ``then`` makes of the finished ``work``; cancelled with it."""
    result: Future[Outcome | Failure] = Future()

    def settle(work: Future[T]) -> None:
        if work.cancelled():
            result.cancel()
            return
        try:
            result.set_result(then(work))
        except BaseException as error:
            result.set_exception(error)

    work.add_done_callback(settle)
    return result
