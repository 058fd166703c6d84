"""From sequences to micro-batches, for the trainer, scoring, ``verify`` and plugins alike.

``plan_step`` assigns sequences to ranks and packs, from lengths alone; ``collate_packs`` builds the tensors.
``pack`` does both, for a program that holds all sequences itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fspo.packing.batch import MicroBatch, MicroBatches, Prefix, Sequences, StepTotals, Turns
from megatron_fspo.packing.plan import plan_micro_batches
from megatron_fspo.packing.zigzag import chunks_per_sequence, local_runs, padded_length


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """The parallel layout that packs must fit, and their size."""

    max_tokens: int | None = None
    """Most tokens of a micro-batch, over all context-parallel ranks; None: all sequences in one."""
    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    multiple_of: int = 1
    """A rank's tokens of a pack are a multiple of this: tensor-parallel size under sequence parallelism."""
    count_multiple_of: int = 1
    """Micro-batches per rank are a multiple of this: pipeline size under the interleaved schedule."""
    costs: Callable[[Sequence[int]], Sequence[int]] | None = None
    """Maps padded lengths to the costs that packs balance; None: the lengths."""
    share_prompts: bool = False
    """Consecutive sequences of a pack with the same prompt share it, except for its last token."""
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.share_prompts and self.context_size > 1:
            raise ValueError("share_prompts needs context_size = 1: context parallelism splits sequences")


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
    response_lengths: Sequence[int],
    layout: PackLayout,
    *,
    lengths: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    first: int = 0,
    left_out: Sequence[bool] | None = None,
    prompts: Sequence[int] | None = None,
) -> tuple[Plan, StepTotals]:
    """Plan one optimizer step, from integers alone, so that every rank makes the same plan.

    Args:
        prompt_lengths: prompt tokens of all sequences of the step.
        response_lengths: tokens after the prompt of each.
        layout: sizes of micro-batches and parallel groups.
        lengths: response tokens that the policy wrote; None: all.
        rows: rows of each sequence; None: one.
        first: number of the first sequence; the others follow.
        left_out: sequences that count in N and T but are in no pack, as their gradient is 0.
        prompts: equal numbers for equal prompts; None: all differ.

    Raises:
        ValueError: a sequence does not fit a micro-batch.
    """
    whole = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    lengths = response_lengths if lengths is None else lengths
    packed = [i for i in range(len(whole)) if left_out is None or not left_out[i]]
    tokens = [
        padded_length(whole[i], layout.context_size, rows=1 if rows is None else rows[i]) for i in packed
    ]
    if prompts is None or not layout.share_prompts:
        prompts = range(len(whole))
    units = _units(tokens, [prompt_lengths[i] - 1 for i in packed], [prompts[i] for i in packed], layout)
    plan = plan_micro_batches(
        [unit.tokens for unit in units],
        ranks=layout.data_size,
        max_tokens=layout.max_tokens or max(sum(tokens), 1),
        costs=[unit.cost for unit in units],
        count_multiple_of=layout.count_multiple_of,
    )
    totals = StepTotals(
        num_sequences=sum(length > 0 for length in lengths),
        num_tokens=sum(lengths),
        packed_tokens=sum(lengths[i] for i in packed),
    )
    numbers = [
        [sorted(first + packed[i] for unit in bin for i in units[unit].members) for bin in rank]
        for rank in plan
    ]
    return numbers, totals


class _Unit(NamedTuple):
    """Sequences with a shared prompt that go into one micro-batch together."""

    members: list[int]
    tokens: int
    cost: int


def _units(
    tokens: Sequence[int], prefixes: Sequence[int], prompts: Sequence[int], layout: PackLayout
) -> list[_Unit]:
    """Join sequences of one prompt while they fit a micro-batch and a rank's load stays several units.
    ``tokens`` is of each sequence alone, of which ``prefixes`` can be shared; ``prompts`` is equal for
    consecutive sequences that may be joined."""
    # Causal attention also costs a shared prefix once: (p + l)² = p² + 2pl + l².
    costs, saved = (x if layout.costs is None else layout.costs(x) for x in (tokens, prefixes))
    again = [i for i in range(1, len(tokens)) if prompts[i] == prompts[i - 1]]
    most = sum(costs) - sum(saved[i] for i in again)
    if layout.data_size > 1:
        most //= 2 * layout.data_size
    units: list[_Unit] = []
    for i in range(len(tokens)):
        unit = _Unit([i], tokens[i], costs[i])
        if i and prompts[i] == prompts[i - 1]:
            last = units[-1]
            both = _Unit(
                [*last.members, i], last.tokens + tokens[i] - prefixes[i], last.cost + costs[i] - saved[i]
            )
            if both.tokens <= (layout.max_tokens or both.tokens) and both.cost <= most:
                unit = both
                units.pop()
        units.append(unit)
    return units


def plan_packs(sequences: Sequences, layout: PackLayout) -> tuple[Plan, StepTotals]:
    """Plan one optimizer step of which all sequences are here. Raises like :func:`plan_step`."""
    return plan_step(
        sequences.prompt_lengths.tolist(),
        sequences.response_lengths.tolist(),
        layout,
        lengths=sequences.lengths.tolist(),
        rows=[len(borders) - 1 for borders in sequences.borders],
        prompts=sequences.prompts.tolist(),
    )


def collate(sequences: Sequences, rows: Sequence[int], totals: StepTotals, layout: PackLayout) -> MicroBatch:
    """Pack some sequences on the CPU, and keep the tokens of one context-parallel rank.

    Args:
        sequences: to choose from.
        rows: indices of the chosen sequences.
        totals: N and T of the whole optimizer step.
        layout: the rank keeps the tokens of :func:`local_runs`. An empty micro-batch becomes one tail, so
            that every rank runs the same collectives.
    """
    chosen = torch.tensor(rows, dtype=torch.long)
    places = sequences.places.index_select(0, chosen)
    prompts, responses, *_ = places.unbind(1)
    blocks, prefixes = _blocks(sequences, chosen, share=layout.share_prompts)
    number, first, end, restart = torch.tensor(blocks, dtype=torch.long).view(-1, 4).unbind(1)
    chunks = chunks_per_sequence(layout.context_size)
    size = end - first + -(end - first) % chunks
    filled = int(size.sum())
    # A tail must split into chunks as well; multiple_of applies to the rank's share of the whole row.
    step = math.lcm(chunks, layout.context_size * layout.multiple_of)
    tail = -filled % step if filled else step
    padded = torch.cat([size, size.new_tensor([tail] if tail else [])])
    first, end, restart = (_filled(column, len(padded)) for column in (first, end, restart))
    # The kinds of positions: before the mask, in it, the last token, padding. A tail is padding.
    ends = torch.stack([prompts - 1, prompts + responses - 1], dim=1)[number]
    ends = torch.cat([_filled(ends, len(padded)).minimum(end[:, None]), end[:, None]], dim=1)
    edges = torch.stack([torch.zeros_like(padded), *ends.unbind(1), first + padded], dim=1)
    held = local_runs(padded, layout.context_rank, layout.context_size) + first[:, None, None]
    sizes = edges[:, None].clamp(held[..., :1], held[..., 1:]).diff(dim=-1)
    borders = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    flat = _rows(sequences, chosen[number], ends.tolist(), held.tolist())
    reference = None if sequences.reference is None else flat.pop()
    owner = torch.cat([number, number.new_full((len(padded) - len(number),), len(rows))])
    per_token = _per_token(flat, sizes, held[..., 0], owner, nobody=len(rows))
    turns = _turns(sequences.loss_mask, places, per_token) if sequences.loss_mask is not None else None
    routes = None
    if sequences.routes is not None:
        routes = sequences.routes_at(chosen, per_token["segment"], per_token["position_ids"][0])
    restarted = None
    if restart.any():
        restarted = torch.repeat_interleave(restart, padded // layout.context_size)
    for prefix in prefixes:
        per_token["segment"][prefix.start : prefix.end] = len(rows)
    return MicroBatch(
        **per_token,
        reference_log_probs=reference,
        restarted=restarted,
        routes=routes,
        turns=turns,
        prefixes=prefixes,
        borders=borders.to(torch.int32),
        owner=owner,
        longest=int((first - restart + padded).max()),
        lengths=sequences.lengths[chosen],
        advantages=sequences.advantages[chosen],
        sample_index=sequences.index[chosen],
        totals=totals,
    )


def _blocks(
    sequences: Sequences, chosen: Tensor, *, share: bool
) -> tuple[list[tuple[int, int, int, int]], tuple[Prefix, ...]]:
    """Return the blocks that lie end to end in a pack, each (index in ``chosen``, first position, end,
    position where its row begins), and the shared prefixes, which are blocks of their first sequence."""
    prompts = sequences.prompts[chosen].tolist() if share else range(len(chosen))
    borders = [sequences.borders[i] for i in chosen.tolist()]
    lengths = sequences.prompt_lengths[chosen].tolist()
    blocks: list[tuple[int, int, int, int]] = []
    prefixes = []
    row = 0
    for _, group in groupby(range(len(chosen)), key=prompts.__getitem__):
        members = [*group]
        first = lengths[members[0]] - 1 if len(members) > 1 else 0
        if first:
            blocks.append((members[0], 0, first, 0))
            prefixes.append(Prefix(row, row + first, range(members[0], members[-1] + 1)))
        blocks += [(i, first, borders[i][1], 0) for i in members]
        # Further rows follow those that share the prompt.
        blocks += [(i, *ends, ends[0]) for i in members for ends in pairwise(borders[i][1:])]
        row += first + sum(borders[i][-1] - first for i in members)
    return blocks, tuple(prefixes)


def _turns(loss_mask: Tensor, places: Tensor, per_token: Mapping[str, Tensor]) -> Turns:
    """Return the turns of the sequences at ``places``, which are the runs of the loss mask in each."""
    pieces = [pad(loss_mask[start : start + size], (1, 0)) for _, size, _, start in places.tolist()]
    mask = torch.cat([loss_mask[:0], *pieces])
    starts = mask[1:] & ~mask[:-1]
    number = starts.cumsum(0) - 1
    sizes = places[:, 1] + 1
    owner = torch.repeat_interleave(sizes)[1:][starts]
    rows = per_token["rows"]
    begins = (sizes.cumsum(0) - sizes + 1 - places[:, 0])[per_token["segment"][rows]]
    segment = torch.full_like(per_token["segment"], len(owner))
    segment[rows] = number[begins + per_token["position_ids"][0, rows]]
    return Turns(segment=segment, owner=owner, lengths=number[mask[1:]].bincount(minlength=len(owner)))


def _filled(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` rows: ``rows``, then zeros."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _rows(
    sequences: Sequences,
    chosen: Tensor,
    ends: Sequence[Sequence[int]],
    held: Sequence[Sequence[Sequence[int]]],
) -> list[Tensor]:
    """Return tokens, labels, sampled log-probs, and if the sequences have them the loss mask and reference
    log-probs of the labels, where this rank holds them: pieces of the flat arrays, copied once.

    Args:
        sequences: to choose from.
        chosen: the sequence of each block.
        ends: per block, and of the tail: where the mask begins, where labels end, and where tokens end.
        held: per block, and of the tail: runs [first, end) of positions that this rank holds.
    """
    starts = _filled(sequences.places.index_select(0, chosen), len(held))[:, 2:].tolist()
    prompts = _filled(sequences.prompt_lengths[chosen], len(held)).tolist()
    longest = max(end - first for runs in held for first, end in runs)
    of_labels = [sequences.log_probs]
    of_labels += [values for values in (sequences.loss_mask, sequences.reference) if values is not None]
    flat = [sequences.tokens, sequences.tokens, *of_labels]
    zeros = [values.new_zeros(longest) for values in flat]
    columns = [[none[:0]] for none in zeros]
    for prompt, (start, response_start), (_, labels, whole), runs in zip(
        prompts, starts, ends, held, strict=True
    ):
        spans = [(start, (0, whole)), (start + 1, (0, labels))]
        spans += [(response_start, (prompt - 1, labels))] * len(of_labels)
        for run in runs:
            for column, values, (begin, span), none in zip(columns, flat, spans, zeros, strict=True):
                column += _cut(values, begin, span, run, none)
    return [torch.cat(column) for column in columns]


def _cut(flat: Tensor, start: int, span: tuple[int, int], run: Sequence[int], zeros: Tensor) -> list[Tensor]:
    """Return the entries of one run of positions: from ``flat`` inside ``span``, 0 elsewhere."""
    (low, high), (first, end) = span, run
    after = max(first, min(low, end))
    stop = max(after, min(high, end))
    pieces = [zeros[: after - first]] if after > first else []
    if stop > after:
        pieces.append(flat[start + after - low : start + stop - low])
    return [*pieces, zeros[: end - stop]] if end > stop else pieces


def _per_token(
    columns: Sequence[Tensor], sizes: Tensor, firsts: Tensor, number: Tensor, *, nobody: int
) -> dict[str, Any]:
    """Return the fields of a :class:`MicroBatch` that have t entries.

    Args:
        columns: from :func:`_rows`, [t].
        sizes: [n, runs, 4] number of positions of each kind, per run of each block and of the tail.
        firsts: [n, runs] first positions of the runs.
        number: [n] sequence of each block.
        nobody: the segment of padding.
    """
    tokens, labels, sampled, *own = columns
    kind = torch.repeat_interleave(sizes.flatten().int(), output_size=len(tokens))
    segment = torch.stack([number, number, number, torch.full_like(number, nobody)], dim=1)
    mask = torch.tensor([False, True, False, False])
    ends = sizes.sum(-1).flatten().cumsum(0).view(firsts.shape)
    shift = firsts - ends + sizes.sum(-1)
    per_token = (
        values.expand(sizes.shape).flatten().index_select(0, kind)
        for values in (shift[..., None], mask, segment[:, None])
    )
    shift, mask, segment = per_token
    for owned in own:
        mask = mask & owned
    rows = mask.nonzero()[:, 0]
    wanted = labels[rows]
    return {
        "tokens": tokens.long()[None],
        "position_ids": torch.arange(len(tokens)).add_(shift)[None],
        "labels": labels.long(),
        "loss_mask": mask,
        "rows": rows,
        "label_range": (int(wanted.min()), int(wanted.max())) if len(wanted) else (0, 0),
        "segment": segment,
        "sampled_log_probs": sampled,
    }


def collate_packs(sequences: Sequences, packs: Sequence[Pack], layout: PackLayout) -> MicroBatches:
    """Return the micro-batches of the planned packs."""
    row = {number: row for row, number in enumerate(sequences.index.tolist())}
    batches = [
        collate(sequences, [row[number] for number in pack.numbers], pack.totals, layout) for pack in packs
    ]
    return MicroBatches(sequences, batches, layout.device)


def pack(sequences: Sequences, layout: PackLayout, *, plan: Plan | None = None) -> MicroBatches:
    """Return this rank's micro-batches of one optimizer step.

    Example::

        batches = pack(
            Sequences.of(prompts=prompts, responses=responses, advantages=advantages),
            PackLayout(max_tokens=16384, data_rank=dp.rank(), data_size=dp.size()),
        )

    Args:
        sequences: all of the step, the same on every rank.
        layout: sizes of micro-batches and parallel groups, and this rank in them.
        plan: the assignment to use; None: a new plan.

    Raises:
        ValueError: a sequence does not fit a micro-batch.
    """
    planned, totals = plan_packs(sequences, layout)
    mine = (planned if plan is None else plan)[layout.data_rank]
    return collate_packs(sequences, [Pack(numbers=tuple(numbers), totals=totals) for numbers in mine], layout)
