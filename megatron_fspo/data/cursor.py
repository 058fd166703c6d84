"""The order in which a run works through its prompts: of one set, or of several mixed by weight."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from megatron_fspo.config.data import Data
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt


class Cursor(Protocol):
    """An endless walk over prompt indices that can be stopped and resumed anywhere."""

    def take(self, n: int) -> list[int]:
        """The next ``n`` prompt indices, each once: ``ValueError`` if there are too few prompts."""

    def place(self) -> dict[str, Any]:
        """Where the walk stands, for JSON."""

    def seek(self, place: dict[str, Any]) -> None:
        """Go to a place; ``InputError`` if it is none."""

    def state_dict(self) -> dict[str, Any]:
        """The place, and over what the walk goes; for JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; ``InputError`` if it comes from other data, another seed or another order."""


class PromptCursor:
    """A walk over the ``num_prompts`` prompts of one set.

    Each epoch has an order that depends on ``(seed, epoch)`` alone; without ``shuffle`` it is the file's.

    Raises ``InputError`` if there are no prompts.
    """

    def __init__(self, num_prompts: int, seed: int | str, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise InputError(f"at least one prompt is needed, found {num_prompts}")
        self._identity = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self._num_prompts = num_prompts
        self._go(epoch=0, offset=0)

    def _go(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._order = list(range(self._num_prompts))
        if self._identity["shuffle"]:
            # A string seeds the generator through SHA-512: neighbouring seeds and epochs share nothing.
            random.Random(f"{self._identity['seed']}/{epoch}").shuffle(self._order)

    def __len__(self) -> int:
        return self._num_prompts

    def take(self, n: int) -> list[int]:
        """The next ``n`` prompt indices, each once: ``ValueError`` if there are fewer prompts.

        Shuffled, what is left of an epoch but too short for the batch is skipped, and no prompt for good,
        since every epoch has another order. Unshuffled, the batch goes on at the top of the file.
        """
        if n > len(self._order):
            raise ValueError(f"{n} prompts at once, but there are only {len(self._order)}")
        if self._identity["shuffle"] and self._offset + n > len(self._order):
            self._go(self._epoch + 1, 0)
        taken: list[int] = []
        while len(taken) < n:
            step = self._order[self._offset : self._offset + n - len(taken)]
            taken += step
            self._offset += len(step)
            if self._offset == len(self._order):
                self._go(self._epoch + 1, 0)
        return taken

    def place(self) -> dict[str, Any]:
        """``epoch`` and ``offset`` in it."""
        return {"epoch": self._epoch, "offset": self._offset}

    def seek(self, place: dict[str, Any]) -> None:
        """Go to a place; ``InputError`` if it is none of this walk."""
        epoch, offset = place["epoch"], place["offset"]
        if not (_is_count(epoch) and _is_count(offset) and offset < len(self._order)):
            raise InputError(
                f"prompt cursor: epoch {epoch!r}, offset {offset!r} is no place in {len(self._order)} prompts"
            )
        self._go(epoch, offset)

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands, and over what: integers and a boolean, for JSON."""
        return {**self.place(), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; ``InputError`` if it comes from other data, another seed or another order."""
        _check_identity(state, self._identity, ("epoch", "offset"))
        self.seek(state)


class MixedCursor:
    """A walk over several sets, each of which comes as often as its weight says.

    Which set is next is the one that is furthest behind its share, so that after t prompts a set with the
    share w has given more than w·t − (sets − 1) and less than w·t + 1 of them. The arithmetic is exact. Each
    set is walked through by a :class:`PromptCursor` with a seed of its own. Shuffled, what one ``take`` gives
    is in random order: dealt out to ranks and mini-batches, no one of them gets a set more than others.

    The sets' prompts are numbered one after the other.

    Args:
        sets: name, number of prompts and weight of each.

    Raises:
        InputError: a set has no prompts.
    """

    def __init__(self, sets: Sequence[tuple[str, int, float]], seed: int, shuffle: bool = True) -> None:
        whole = sum(_exact(weight) for _, _, weight in sets)
        shares = [_exact(weight) / whole for _, _, weight in sets]
        self._parts = [PromptCursor(size, f"{seed}/{name}", shuffle) for name, size, _ in sets]
        self._first = [sum(size for _, size, _ in sets[:n]) for n in range(len(sets))]
        self._taken = [0] * len(sets)
        # Integers in the ratio of the shares.
        unit = math.lcm(*(share.denominator for share in shares))
        self._weights = [int(share * unit) for share in shares]
        self._unit = unit
        self._identity = {
            "seed": seed,
            "shuffle": shuffle,
            "mixed": [
                {"name": name, "num_prompts": size, "share": str(share)}
                for (name, size, _), share in zip(sets, shares, strict=True)
            ],
        }

    def take(self, n: int) -> list[int]:
        """The next ``n`` prompt indices, each once: ``ValueError`` if a set has too few for its part."""
        first = sum(self._taken)
        taken = list(self._taken)
        order = []
        for position in range(first + 1, first + n + 1):
            behind = [w * position - t * self._unit for w, t in zip(self._weights, taken, strict=True)]
            order.append(behind.index(max(behind)))
            taken[order[-1]] += 1
        counts = [now - before for now, before in zip(taken, self._taken, strict=True)]
        for part, count in zip(self._parts, counts, strict=True):
            if count > len(part):
                raise ValueError(f"{count} prompts at once, but a set has only {len(part)}")
        if self._identity["shuffle"]:
            random.Random(f"order {self._identity['seed']} {first}").shuffle(order)
        self._taken = taken
        given = [iter(part.take(count)) for part, count in zip(self._parts, counts, strict=True)]
        return [self._first[number] + next(given[number]) for number in order]

    def place(self) -> dict[str, Any]:
        """Of each set its place, and how many it has given."""
        places = [part.place() for part in self._parts]
        return {"sets": [{**at, "taken": t} for at, t in zip(places, self._taken, strict=True)]}

    def seek(self, place: dict[str, Any]) -> None:
        """Go to a place; ``InputError`` if it is none of this walk."""
        sets = place["sets"]
        keys = {"epoch", "offset", "taken"}
        if not (
            isinstance(sets, list)
            and len(sets) == len(self._parts)
            and all(isinstance(at, dict) and at.keys() == keys and _is_count(at["taken"]) for at in sets)
        ):
            raise InputError(f"prompt cursor: {sets!r} is no place in {len(self._parts)} sets")
        before = [part.place() for part in self._parts]
        try:
            for part, at in zip(self._parts, sets, strict=True):
                part.seek(at)
        except InputError:
            for part, at in zip(self._parts, before, strict=True):
                part.seek(at)
            raise
        self._taken = [at["taken"] for at in sets]

    def state_dict(self) -> dict[str, Any]:
        """The place, and the sets with their shares; for JSON."""
        return {**self.place(), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; ``InputError`` if it comes from other data, weights, seed or order."""
        _check_identity(state, self._identity, ("sets",))
        self.seek(state)


def mixture(prompts: Sequence[Prompt], data: Data) -> list[tuple[str, int, float]]:
    """Name, number of prompts and weight of the training sets; without weights all prompts weigh the same."""
    sizes = Counter(prompt.dataset for prompt in prompts)
    return [(one.title, sizes[one.title], one.weight or float(sizes[one.title])) for one in data.train_sets]


def make_cursor(prompts: Sequence[Prompt], data: Data, seed: int) -> Cursor:
    """The walk over a run's training prompts."""
    sets = mixture(prompts, data)
    if len(sets) == 1:
        return PromptCursor(len(prompts), seed, data.shuffle)
    return MixedCursor(sets, seed, data.shuffle)


def most_at_once(sets: Sequence[tuple[str, int, float]], n: int) -> list[int]:
    """Of each set the most prompts that ``n`` prompts in a row of the mixture may hold."""
    whole = sum(_exact(weight) for _, _, weight in sets)
    return [math.ceil(_exact(weight) / whole * n + len(sets)) - 1 for _, _, weight in sets]


def _exact(weight: float) -> Fraction:
    """As it is written: 0.1 is a tenth."""
    return Fraction(str(weight))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_identity(state: dict[str, Any], mine: dict[str, Any], place: tuple[str, ...]) -> None:
    legal = {*place, *mine}
    if ("mixed" in state) != ("mixed" in mine):
        one, other = ("several sets", "one") if "mixed" in state else ("one set", "several")
        raise InputError(
            f"prompt cursor: the checkpoint is from a run over {one}, this run is over {other};"
            " resume with the same data, or start a new run"
        )
    if set(state) != legal:
        raise InputError(f"prompt cursor: the state has the keys {sorted(state)}, not {sorted(legal)}")
    for key, value in mine.items():
        if state[key] != value:
            raise InputError(
                f"prompt cursor: the checkpoint has {key} = {state[key]!r}, this run {value!r};"
                " resume with the same data and seed, or start a new run"
            )
