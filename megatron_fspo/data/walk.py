"""Which prompts a step gets: its batch, maybe long before its turn, and further ones at its turn."""

from __future__ import annotations

from collections import deque
from typing import Any

from megatron_fspo.data.prompts import PromptCursor
from megatron_fspo.errors import InputError


class PromptWalk:
    """Hands out prompts in the order of one cursor, and remembers which batches are still to be learned from.

    Sampling ahead takes the batches of later steps before a step takes further prompts. So the walk stands
    somewhere else than where those batches began, and a run that resumes needs both: it gets the same
    batches again, then goes on where the walk stood.

    Args:
        size: prompts of a batch.
    """

    def __init__(self, cursor: PromptCursor, size: int) -> None:
        self._cursor = cursor
        self._size = size
        self._open: deque[dict[str, Any]] = deque()
        """Where the cursor stood before each batch that was taken and not closed."""
        self._again: deque[dict[str, Any]] = deque()
        """The same for batches that a run had open when it was saved, and that are not taken again yet."""

    def batch(self) -> list[int]:
        """The prompt indices of the next batch. It stays open: see :meth:`close`."""
        if not self._again:
            self._open.append(self._cursor.state_dict())
            return self._cursor.take(self._size)
        now = self._cursor.state_dict()
        self._open.append(self._again.popleft())
        self._cursor.load_state_dict(self._open[-1])
        taken = self._cursor.take(self._size)
        self._cursor.load_state_dict(now)
        return taken

    def close(self) -> None:
        """The oldest open batch is being learned from: a state saved from here on goes on after it."""
        self._open.popleft()

    def further(self, n: int) -> list[int]:
        """``n`` prompt indices beside the batches, at most a batch of them."""
        return self._cursor.take(n)

    def state_dict(self) -> dict[str, Any]:
        """The cursor's state, and as ``open`` the places of the open batches; for JSON."""
        places = [{"epoch": at["epoch"], "offset": at["offset"]} for at in (*self._open, *self._again)]
        return {**self._cursor.state_dict(), "open": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; one without ``open`` stands before the oldest batch, as older checkpoints do.

        Raises:
            InputError: it comes from other data, another seed or another order, or makes no sense.
        """
        now = {key: value for key, value in state.items() if key != "open"}
        places = state.get("open", [])
        if not isinstance(places, list) or not all(
            isinstance(at, dict) and at.keys() == {"epoch", "offset"} for at in places
        ):
            raise InputError(f"prompt walk: {places!r} are no places of batches")
        again = [{**now, **at} for at in places]
        for at in (*again, now):
            self._cursor.load_state_dict(at)
        self._open.clear()
        self._again = deque(again)
