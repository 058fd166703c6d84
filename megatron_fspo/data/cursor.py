"""The order of a run's prompts, from one set or from several mixed by weight."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from typing import Any

from megatron_fspo.config.data import Data
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt

Sets = Sequence[tuple[str, int, float]]
"""Name, number of prompts and weight of each set."""
Position = list[list[int]]
"""For each set: epoch, offset in it, and number of prompts taken, as JSON types."""


class PromptCursor:
    """Yields prompt indices without end; can be saved and resumed at any point.

    The order of an epoch depends on seed, set and epoch only; without ``shuffle`` it is the file's. The next
    prompt comes from the set that is furthest behind its share: after t prompts, a set with share w has given
    more than w·t − (sets − 1) and less than w·t + 1 of them, in exact arithmetic. With ``shuffle``, prompts
    taken together are in random order, so that ranks and mini-batches get the same mix of sets on average.

    Sampling ahead takes the batches of later steps early, so the cursor's position differs from where the
    open batches began. A resumed run needs both: it repeats the open batches, then continues at the position.

    Prompts are numbered set by set, and ``rows`` is their digest; a batch has ``size`` prompts. Raises
    ``InputError`` if a set is empty.
    """

    def __init__(self, sets: Sets, seed: int, *, size: int, shuffle: bool = True, rows: str = "") -> None:
        if empty := [name for name, prompts, _ in sets if prompts < 1]:
            raise InputError(f"the data set {empty[0]!r} has no prompts; at least one is needed")
        shares = _shares(sets)
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = [
            _Epochs(prompts, f"{seed}/{name}" if len(sets) > 1 else str(seed), shuffle)
            for name, prompts, _ in sets
        ]
        self._first = [sum(prompts for _, prompts, _ in sets[:n]) for n in range(len(sets))]
        self._taken = [0] * len(sets)
        self._unit = math.lcm(*(share.denominator for share in shares))
        self._weights = [int(share * self._unit) for share in shares]
        self._open: deque[Position] = deque()
        """Positions before the batches that were taken and not closed."""
        self._again: deque[Position] = deque()
        """Positions before the batches that were open when the run was saved and are not taken again yet."""
        self._identity = {
            "sets": [[name, prompts, str(w)] for (name, prompts, _), w in zip(sets, shares, strict=True)],
            "seed": seed,
            "shuffle": shuffle,
            "rows": rows,
        }

    def batch(self) -> list[int]:
        """Return the prompt indices of the next batch, each once. It stays open until :meth:`close`."""
        if not self._again:
            self._open.append(self._position())
            return self.further(self._size)
        now = self._position()
        self._open.append(self._again.popleft())
        self._seek(self._open[-1])
        taken = self.further(self._size)
        self._seek(now)
        return taken

    def close(self) -> None:
        """Close the oldest open batch, when training on it begins: a state saved later continues after it."""
        self._open.popleft()

    def further(self, n: int) -> list[int]:
        """Return ``n`` prompt indices outside batches, each once; ``ValueError`` if a set has too few."""
        first = sum(self._taken)
        taken = list(self._taken)
        order = []
        for position in range(first + 1, first + n + 1):
            behind = [w * position - t * self._unit for w, t in zip(self._weights, taken, strict=True)]
            order.append(behind.index(max(behind)))
            taken[order[-1]] += 1
        counts = [now - before for now, before in zip(taken, self._taken, strict=True)]
        for epochs, count in zip(self._epochs, counts, strict=True):
            if count > len(epochs.order):
                raise ValueError(f"cannot take {count} prompts at once from a set of {len(epochs.order)}")
        if self._shuffle:
            random.Random(f"order {self._seed} {first}").shuffle(order)
        self._taken = taken
        given = [iter(epochs.take(count)) for epochs, count in zip(self._epochs, counts, strict=True)]
        return [self._first[number] + next(given[number]) for number in order]

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the sets, the position, and where the open batches began, as JSON types."""
        return {**self._identity, "position": self._position(), "open": [*self._open, *self._again]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises ``InputError`` if it is invalid or from other data or settings."""
        if state.keys() != (mine := self.state_dict()).keys():
            raise InputError(f"prompt cursor: the state has keys {sorted(state)}, expected {sorted(mine)}")
        for key, value in self._identity.items():
            if state[key] != value:
                raise InputError(
                    f"prompt cursor: the checkpoint has {key} = {state[key]!r}, but this run has {value!r};"
                    " resume with the same data and seed, or start a new run"
                )
        opened = state["open"] if isinstance(state["open"], list) else [state["open"]]
        for position in (state["position"], *opened):
            if not self._is_position(position):
                raise InputError(f"prompt cursor: invalid position {position!r} in {self._identity['sets']}")
        self._seek(state["position"])
        self._open.clear()
        self._again = deque(opened)

    def _position(self) -> Position:
        return [[epoch.epoch, epoch.offset, t] for epoch, t in zip(self._epochs, self._taken, strict=True)]

    def _seek(self, position: Position) -> None:
        for epochs, (epoch, offset, _) in zip(self._epochs, position, strict=True):
            epochs.seek(epoch, offset)
        self._taken = [taken for _, _, taken in position]

    def _is_position(self, position: Any) -> bool:
        return (
            isinstance(position, list)
            and len(position) == len(self._epochs)
            and all(isinstance(at, list) and len(at) == 3 for at in position)
            and all(type(number) is int and number >= 0 for at in position for number in at)
            and all(at[1] < len(epochs.order) for at, epochs in zip(position, self._epochs, strict=True))
        )


class _Epochs:
    """The epochs of one set."""

    def __init__(self, prompts: int, seed: str, shuffle: bool) -> None:
        self.order = list(range(prompts))
        self.epoch = -1
        self.offset = 0
        self._seed = seed
        self._shuffle = shuffle
        self.seek(0, 0)

    def seek(self, epoch: int, offset: int) -> None:
        if self._shuffle and epoch != self.epoch:
            self.order.sort()
            # A string seeds the generator through SHA-512, so neighbouring seeds and epochs are unrelated.
            random.Random(f"{self._seed}/{epoch}").shuffle(self.order)
        self.epoch, self.offset = epoch, offset

    def take(self, n: int) -> list[int]:
        """Return ``n`` indices, each once. With shuffle, a remainder of an epoch shorter than ``n`` is
        skipped; every epoch has another order, so no prompt is skipped for good. Without, indices wrap
        around."""
        if self._shuffle and self.offset + n > len(self.order):
            self.seek(self.epoch + 1, 0)
        taken: list[int] = []
        while len(taken) < n:
            step = self.order[self.offset : self.offset + n - len(taken)]
            taken += step
            self.offset += len(step)
            if self.offset == len(self.order):
                self.seek(self.epoch + 1, 0)
        return taken


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the texts, answers and responses of prompts, in order."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answer]).encode())
        if prompt.demonstration is not None:
            digest.update(bytes(memoryview(array("i", prompt.demonstration.token_ids))))
            digest.update(bytes(prompt.demonstration.loss_mask))
    return digest.hexdigest()


def mixture(prompts: Sequence[Prompt], data: Data) -> Sets:
    """Return the training sets of a run; without weights, all prompts weigh the same."""
    sizes = Counter(prompt.dataset for prompt in prompts)
    return [(one.title, sizes[one.title], one.weight or float(sizes[one.title])) for one in data.train_sets]


def most_at_once(sets: Sets, n: int) -> list[int]:
    """Return, for each set, the most prompts that ``n`` consecutive prompts of the mixture can contain."""
    return [math.ceil(share * n + len(sets)) - 1 for share in _shares(sets)]


def _shares(sets: Sets) -> list[Fraction]:
    weights = [Fraction(str(weight)) for _, _, weight in sets]  # as written: 0.1 is exactly 1/10
    return [weight / sum(weights) for weight in weights]
