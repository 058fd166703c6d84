"""The one way from sequences to micro-batches: the trainer, scoring, ``verify`` and plugins all take it.

``plan_step`` decides which sequence goes to which rank and pack, from lengths alone; ``collate_packs`` makes
the tensors; ``Packs`` moves those of a pack to the device when its turn comes. ``pack`` does all of it for a
program that holds its sequences itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from megatron_fspo.packing.batch import MicroBatch, Sequences, StepTotals, collate, padded_length
from megatron_fspo.packing.plan import plan_micro_batches


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """The parallel layout that packs must fit, and the tokens that a micro-batch may hold."""

    max_tokens: int | None = None
    """Tokens of a micro-batch over all context ranks; None: whatever the sequences need, in one."""
    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    multiple_of: int = 1
    """A rank's tokens of a pack are a multiple of this: tensor parallel size under sequence parallel."""
    count_multiple_of: int = 1
    """Micro-batches per rank are a multiple of this: pipeline size under the interleaved schedule."""
    costs: Callable[[Sequence[int]], Sequence[int]] | None = None
    """From padded lengths to what packs share out evenly; None: the tokens."""
    device: torch.device | str = "cpu"


Plan = list[list[list[int]]]
"""``plan[data-parallel rank][micro-batch]``: numbers of sequences."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The sequences of one micro-batch."""

    numbers: tuple[int, ...]
    """Numbers of the sequences in the step."""
    totals: StepTotals


def plan_step(
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    layout: PackLayout,
    *,
    first: int = 0,
    left_out: Sequence[bool] | None = None,
) -> tuple[Plan, StepTotals]:
    """Plan one optimizer step. From integers alone, so every rank plans the same.

    Args:
        prompt_lengths, lengths: of all sequences of the step, in tokens.
        first: number of the first; the others follow.
        left_out: sequences that count in N and T and are in no pack, as their gradient is 0.

    Raises:
        ValueError: a sequence does not fit a micro-batch.
    """
    packed = [i for i in range(len(lengths)) if left_out is None or not left_out[i]]
    tokens = [padded_length(prompt_lengths[i] + lengths[i], layout.context_size) for i in packed]
    plan = plan_micro_batches(
        tokens,
        ranks=layout.data_size,
        max_tokens=layout.max_tokens or max(sum(tokens), 1),
        costs=None if layout.costs is None else layout.costs(tokens),
        count_multiple_of=layout.count_multiple_of,
    )
    totals = StepTotals(
        num_sequences=sum(length > 0 for length in lengths),
        num_tokens=sum(lengths),
        packed_tokens=sum(lengths[i] for i in packed),
    )
    return [[[first + packed[i] for i in numbers] for numbers in rank] for rank in plan], totals


class Packs(Sequence[MicroBatch]):
    """Micro-batches of one rank, collated once on the CPU, 37 bytes per token that the rank holds; each is on
    the device only while it is at work.

    Args:
        sequences: that the micro-batches are made of.
        batches: in the order of their turns; those of several optimizer steps may follow each other.
        columns: per-token fields of :class:`MicroBatch` to add, one tensor [t] for each micro-batch.
    """

    def __init__(
        self,
        sequences: Sequences,
        batches: Sequence[MicroBatch],
        device: torch.device | str,
        columns: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self._sequences, self._batches, self._device = sequences, list(batches), device
        self._columns = {name: list(tensors) for name, tensors in (columns or {}).items()}

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Packs: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Packs:
        if isinstance(index, slice):
            some = {name: tensors[index] for name, tensors in self._columns.items()}
            return Packs(self._sequences, self._batches[index], self._device, some)
        columns: dict[str, Any] = {name: tensors[index] for name, tensors in self._columns.items()}
        return replace(self._batches[index].to(self._device), **columns)

    @property
    def sequences(self) -> Sequences:
        """The sequences that they are made of."""
        return self._sequences

    @property
    def columns(self) -> Mapping[str, Sequence[Tensor]]:
        """The per-token fields that were added to them."""
        return self._columns

    @property
    def tokens(self) -> int:
        """Count the tokens of all of them on this rank, padding included."""
        return sum(batch.mask.numel() for batch in self._batches)

    @property
    def totals(self) -> StepTotals:
        """The totals of the optimizer step of the first of them."""
        return self._batches[0].totals

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    def with_columns(self, **columns: Sequence[Tensor]) -> Packs:
        """Return them with more per-token fields, one tensor [t] for each micro-batch."""
        return Packs(self._sequences, self._batches, self._device, {**self._columns, **columns})


def collate_packs(sequences: Sequences, packs: Sequence[Pack], layout: PackLayout) -> Packs:
    """Micro-batches of what a plan says."""
    row = {number: row for row, number in enumerate(sequences.index.tolist())}
    batches = [
        collate(
            sequences,
            [row[number] for number in pack.numbers],
            totals=pack.totals,
            context_rank=layout.context_rank,
            context_size=layout.context_size,
            multiple_of=layout.multiple_of,
        )
        for pack in packs
    ]
    return Packs(sequences, batches, layout.device)


def pack(sequences: Sequences, layout: PackLayout, *, plan: Plan | None = None) -> Packs:
    """This rank's micro-batches of one optimizer step.

    Example::

        batches = pack(
            Sequences.of(prompts=prompts, responses=responses, advantages=advantages),
            PackLayout(max_tokens=16384, data_rank=dp.rank(), data_size=dp.size()),
        )

    Args:
        sequences: all of the step, the same on every rank.
        plan: who gets what, where it is not to be worked out.

    Raises:
        ValueError: a sequence does not fit a micro-batch.
    """
    planned, totals = plan_step(sequences.prompt_lengths.tolist(), sequences.lengths.tolist(), layout)
    mine = (planned if plan is None else plan)[layout.data_rank]
    return collate_packs(sequences, [Pack(numbers=tuple(numbers), totals=totals) for numbers in mine], layout)
