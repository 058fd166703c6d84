"""Which prompts a step gets: its batch, maybe long before its turn, and further ones at its turn."""

from __future__ import annotations

from collections import deque
from typing import Any

from megatron_fspo.data.cursor import Cursor
from megatron_fspo.errors import InputError


class PromptWalk:
    """Hands out prompts in the order of one cursor, and remembers which batches are still to be learned from.

    Sampling ahead takes the batches of later steps before a step takes further prompts. So the walk stands
    somewhere else than where those batches began, and a run that resumes needs both: it gets the same
    batches again, then goes on where the walk stood.

    Args:
        size: prompts of a batch.
    """

    def __init__(self, cursor: Cursor, size: int) -> None:
        self._cursor = cursor
        self._size = size
        self._open: deque[dict[str, Any]] = deque()
        """Where the cursor stood before each batch that was taken and not closed."""
        self._again: deque[dict[str, Any]] = deque()
        """The same for batches that a run had open when it was saved, and that are not taken again yet."""

    def batch(self) -> list[int]:
        """The prompt indices of the next batch. It stays open: see :meth:`close`."""
        if not self._again:
            self._open.append(self._cursor.place())
            return self._cursor.take(self._size)
        now = self._cursor.place()
        self._open.append(self._again.popleft())
        self._cursor.seek(self._open[-1])
        taken = self._cursor.take(self._size)
        self._cursor.seek(now)
        return taken

    def close(self) -> None:
        """The oldest open batch is being learned from: a state saved from here on goes on after it."""
        self._open.popleft()

    def further(self, n: int) -> list[int]:
        """``n`` prompt indices beside the batches, at most a batch of them."""
        return self._cursor.take(n)

    def state_dict(self) -> dict[str, Any]:
        """The cursor's state, and as ``open`` the places of the open batches; for JSON."""
        return {**self._cursor.state_dict(), "open": [*self._open, *self._again]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; one without ``open`` stands before the oldest batch, as older checkpoints do.

        Raises:
            InputError: it comes from other data, another seed or another order, or makes no sense.
        """
        places = state.get("open", [])
        legal = self._cursor.place().keys()
        if not isinstance(places, list) or not all(
            isinstance(at, dict) and at.keys() == legal for at in places
        ):
            raise InputError(f"prompt walk: {places!r} are no places of batches")
        self._cursor.load_state_dict({key: value for key, value in state.items() if key != "open"})
        now = self._cursor.place()
        for at in places:
            self._cursor.seek(at)
        self._cursor.seek(now)
        self._open.clear()
        self._again = deque(places)
