"""Errors a user can act on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """Something the user gave is wrong: a config key, a file, a checkpoint.

    The command line prints the message as one line and ends with exit status 2. So the message names
    the key or file, the value, and what would be right.
    """


class InputErrors(InputError):
    """Several at once, none of which follows from another; in one line it is the first of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(self.problems[0] + more)


class Attempts:
    """Checks, made one after the other, and the problems.

    Example::

        attempt = Attempts()
        model = attempt(lambda: read_model(path))  # None where it raises InputError
        attempt(lambda: check_folder(folder))
        attempt.end()  # raises what was wrong, all together
    """

    def __init__(self) -> None:
        self._problems: list[str] = []

    def __call__(self, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except InputErrors as errors:
            self._problems += errors.problems
        except InputError as error:
            self._problems.append(str(error))
        return None

    def wrong(self, *problems: str) -> None:
        """Add problems that were found without a check that raises."""
        self._problems += problems

    def end(self) -> None:
        """``InputErrors`` if anything was wrong."""
        if self._problems:
            raise InputErrors(self._problems)


class TrainingError(RuntimeError):
    """Training cannot go on (too many non-finite sequences, a non-finite gradient). Exit status 1."""


class RewardError(TrainingError):
    """The rewards of a rollout are no use. Every rank raises it, so a checkpoint may still be written."""


class StopRequested(TrainingError):
    """The job was asked to stop (SIGTERM), and a wait that may end early did."""
