"""Exceptions that the command line reports without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """Invalid user input: a configuration key, an argument, a file, a checkpoint.

    The command line prints the message as one line and exits with status 2. The message must name the key
    or file, the value, and what is accepted.
    """


class InputErrors(InputError):
    """Several independent input errors; the message is the first one and the number of the others."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(self.problems[0] + more)


class Attempts:
    """Runs checks and collects their input errors, to report all of them together.

    Example::

        attempt = Attempts()
        model = attempt(lambda: read_model(path))  # None if it raises InputError
        attempt(lambda: check_folder(folder))
        attempt.end()  # raises InputErrors if a check failed
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
        """Add problems directly."""
        self._problems += problems

    def end(self) -> None:
        """Raise ``InputErrors`` if there are problems."""
        if self._problems:
            raise InputErrors(self._problems)


class TrainingError(RuntimeError):
    """Training cannot continue, for example after a non-finite gradient. Exit status 1."""


class RewardError(TrainingError):
    """The rewards of a rollout are unusable. All ranks raise it, so a checkpoint can still be written."""


class StopRequested(TrainingError):
    """The job received SIGTERM during a wait that can be interrupted."""


class Diverged(TrainingError):
    """The run must end before an optimizer step. ``metrics`` are those of the step."""

    def __init__(self, text: str, metrics: dict[str, float]) -> None:
        super().__init__(text)
        self.metrics = metrics
