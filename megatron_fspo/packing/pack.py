"""The one way from sequences to micro-batches: the trainer, scoring, ``verify`` and plugins all take it.

``plan_step`` decides which sequence goes to which rank and pack, from lengths alone; ``collate_packs`` makes
the tensors. ``pack`` does both for a program that holds its sequences itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.packing.batch import (
    MicroBatch,
    Packs,
    Sequences,
    StepTotals,
    chunks_per_sequence,
    local_runs,
    padded_length,
)
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
    """Maps padded lengths to what packs share out evenly; None: the tokens."""
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
        prompt_lengths: in tokens, of all sequences of the step.
        lengths: response tokens of each.
        layout: sizes of micro-batches and parallel groups.
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


def collate(sequences: Sequences, rows: Sequence[int], totals: StepTotals, layout: PackLayout) -> MicroBatch:
    """Pack some of the sequences, and keep the tokens of one context-parallel rank. On the CPU.

    Args:
        sequences: to choose from.
        rows: places of the sequences in ``sequences``.
        totals: N and T of the whole optimizer step.
        layout: this rank's tokens of a sequence are those of :func:`local_runs`. An empty micro-batch becomes
            one tail, so that every rank runs the same collectives.
    """
    chosen = torch.tensor(rows, dtype=torch.long)
    prompts, lengths, *_ = sequences.places.index_select(0, chosen).unbind(1)
    whole = prompts + lengths
    chunks = chunks_per_sequence(layout.context_size)
    padding = -whole % chunks
    filled = int((whole + padding).sum())
    # A tail must split into chunks as well; the rank's share of the whole row is what multiple_of is about.
    step = math.lcm(chunks, layout.context_size * layout.multiple_of)
    tail = -filled % step if filled else step
    padded = torch.cat([whole + padding, padding.new_tensor([tail] if tail else [])])
    # What positions of a sequence are: before the mask, in it, the last token, padding. A tail is padding.
    ends = torch.stack([prompts - 1, whole - 1, whole], dim=1)
    edges = torch.stack([torch.zeros_like(padded), *_filled(ends, len(padded)).unbind(1), padded], dim=1)
    held = local_runs(padded, layout.context_rank, layout.context_size)
    sizes = edges[:, None].clamp(held[..., :1], held[..., 1:]).diff(dim=-1)
    borders = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    flat = _rows(sequences, chosen, held.tolist())
    per_token = _per_token(flat, sizes, held[..., 0], nobody=len(rows))
    return MicroBatch(
        **per_token,
        routes=None
        if sequences.routes is None
        else sequences.routes_at(chosen, per_token["segment"], per_token["position_ids"][0]),
        borders=borders.to(torch.int32),
        longest=int(padded.max()),
        lengths=lengths,
        advantages=sequences.advantages[chosen],
        sample_index=sequences.index[chosen],
        totals=totals,
    )


def _filled(rows: Tensor, count: int) -> Tensor:
    """``count`` rows, of zeros where there are no more."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _rows(sequences: Sequences, chosen: Tensor, held: Sequence[Sequence[Sequence[int]]]) -> list[Tensor]:
    """Tokens, labels and sampled log-probs where this rank holds them: pieces of the flat arrays, copied
    once. ``held`` has the runs [first, end) of positions of each of the ``chosen`` rows, and of the tail."""
    places = _filled(sequences.places.index_select(0, chosen), len(held)).tolist()
    longest = max(end - first for runs in held for first, end in runs)
    no_token, no_log_prob = sequences.tokens.new_zeros(longest), sequences.log_probs.new_zeros(longest)
    tokens, labels, sampled = [no_token[:0]], [no_token[:0]], [no_log_prob[:0]]
    for (prompt, length, start, sampled_start), runs in zip(places, held, strict=True):
        whole = prompt + length
        for run in runs:
            tokens += _cut(sequences.tokens, start, (0, whole), run, no_token)
            labels += _cut(sequences.tokens, start + 1, (0, whole - 1), run, no_token)
            span = (prompt - 1, whole - 1)
            sampled += _cut(sequences.log_probs, sampled_start, span, run, no_log_prob)
    return [torch.cat(pieces) for pieces in (tokens, labels, sampled)]


def _cut(flat: Tensor, start: int, span: tuple[int, int], run: Sequence[int], zeros: Tensor) -> list[Tensor]:
    """The entries of one run of positions: those in ``span`` come from ``flat``, others are 0."""
    (low, high), (first, end) = span, run
    after = max(first, min(low, end))
    stop = max(after, min(high, end))
    pieces = [zeros[: after - first]] if after > first else []
    if stop > after:
        pieces.append(flat[start + after - low : start + stop - low])
    return [*pieces, zeros[: end - stop]] if end > stop else pieces


def _per_token(columns: Sequence[Tensor], sizes: Tensor, firsts: Tensor, *, nobody: int) -> dict[str, Any]:
    """The fields of a :class:`MicroBatch` that have t entries.

    Args:
        columns: tokens, labels and sampled log-probs [t].
        sizes: [n, runs, 4] positions in each run of each sequence, and of the tail, by what they are.
        firsts: [n, runs] first positions of the runs.
        nobody: the segment of padding.
    """
    tokens, labels, sampled = columns
    kind = torch.repeat_interleave(sizes.flatten().int(), output_size=len(tokens))
    number = torch.arange(len(sizes))
    segment = torch.stack([number, number, number, torch.full_like(number, nobody)], dim=1)
    mask = torch.tensor([False, True, False, False])
    ends = sizes.sum(-1).flatten().cumsum(0).view(firsts.shape)
    shift = firsts - ends + sizes.sum(-1)
    per_token = (
        values.expand(sizes.shape).flatten().index_select(0, kind)
        for values in (shift[..., None], mask, segment[:, None])
    )
    shift, mask, segment = per_token
    rows = mask.nonzero()[:, 0]
    wanted = labels[rows]
    return {
        "tokens": tokens.long()[None],
        "position_ids": torch.arange(len(tokens)).add_(shift)[None],
        "labels": labels.long(),
        "mask": mask,
        "rows": rows,
        "label_range": (int(wanted.min()), int(wanted.max())) if len(wanted) else (0, 0),
        "segment": segment,
        "sampled_log_probs": sampled,
    }


def collate_packs(sequences: Sequences, packs: Sequence[Pack], layout: PackLayout) -> Packs:
    """Micro-batches of what a plan says."""
    row = {number: row for row, number in enumerate(sequences.index.tolist())}
    batches = [
        collate(sequences, [row[number] for number in pack.numbers], pack.totals, layout) for pack in packs
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
        layout: sizes of micro-batches and parallel groups, and this rank in them.
        plan: who gets what, where it is not to be worked out.

    Raises:
        ValueError: a sequence does not fit a micro-batch.
    """
    planned, totals = plan_step(sequences.prompt_lengths.tolist(), sequences.lengths.tolist(), layout)
    mine = (planned if plan is None else plan)[layout.data_rank]
    return collate_packs(sequences, [Pack(numbers=tuple(numbers), totals=totals) for numbers in mine], layout)
