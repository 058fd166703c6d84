"""From sequences to the packed tensors of one micro-batch (THD: all sequences in one row, end to end)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.packing.sequences import Sequences
from megatron_fspo.packing.zigzag import chunks_per_sequence, local_positions


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """n sequences packed into one row, of which this rank holds t tokens: all, or 1 / cp of them.

    Position i of a sequence predicts its token i + 1, so ``labels`` is ``tokens`` shifted left within each
    sequence (before the row is split), and the mask is true where the label is a token of a response. Under
    context parallel every sequence is padded at its end to a multiple of 2·cp. A tail that pads the row is
    one more sequence for the attention, outside every mask.
    """

    tokens: Tensor
    """[1, t] ids."""
    position_ids: Tensor
    """[1, t] position in the sequence, from 0."""
    labels: Tensor
    """[t] next token; 0 where there is none."""
    mask: Tensor
    """[t] bool: the label is a response token. From lengths, not ids: a policy may sample the pad id."""
    segment: Tensor
    """[t] sequence of each token, in [0, n); n in padding."""
    borders: Tensor
    """[n + 1] or, with a tail, [n + 2] int32: cumulative padded lengths from 0, over all context ranks."""
    longest: int
    """Longest padded sequence (or tail), in tokens, over all context ranks."""
    lengths: Tensor
    """[n] response lengths, over all context ranks."""
    advantages: Tensor
    """[n] fp32."""
    sample_index: Tensor
    """[n] which sample of the rollout."""
    sampled_log_probs: Tensor
    """[t] the sampler's log-probs of the labels, 0 outside the mask."""
    old_log_probs: Tensor | None = None
    """[t] log-probs of the labels before this rollout's first update; None: the same as the new ones."""
    reference_log_probs: Tensor | None = None
    """[t] log-probs of the labels under the reference policy, for a KL penalty."""
    rollout_weights: Tensor | None = None
    """[t] finite factors on each token's policy gradient, from a rollout correction; None: all 1."""
    totals: StepTotals
    """Of the optimizer step that it is a part of."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sizes of one optimizer step over all ranks, known before it starts."""

    num_sequences: int
    """N: sequences with a response."""
    num_tokens: int
    """T: their response tokens."""
    packed_tokens: int
    """Those that are in a pack: what Megatron counts and divides by. Less than T where sequences without a
    gradient are left out."""


def padded_length(length: int, context: int = 1) -> int:
    """Tokens that a sequence takes in a pack, with the padding of ``context`` parallel ranks."""
    return length + -length % chunks_per_sequence(context)


def collate(
    sequences: Sequences,
    rows: Sequence[int],
    *,
    totals: StepTotals,
    context_rank: int = 0,
    context_size: int = 1,
    multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack some of the sequences, and keep the tokens of one context-parallel rank.

    Args:
        rows: places of the sequences in ``sequences``.
        context_rank, context_size: which rank of how many; its tokens are those of :mod:`.zigzag`.
        multiple_of: make t a multiple of this (tensor parallel size under sequence parallel). An empty
            micro-batch becomes one tail, so that every rank runs the same collectives.
    """
    chosen = torch.tensor(rows, dtype=torch.long)
    prompts, lengths = sequences.prompt_lengths[chosen], sequences.lengths[chosen]
    whole = prompts + lengths
    chunks = chunks_per_sequence(context_size)
    padding = -whole % chunks
    filled = int((whole + padding).sum())
    # A tail must split into chunks as well; the rank's share of the whole row is what multiple_of is about.
    step = math.lcm(chunks, context_size * multiple_of)
    tail = -filled % step if filled else step
    rows_of_four_bytes = _rows(sequences, chosen, padding.tolist(), tail)
    # Each sequence in runs: positions before the mask, in it, the last token, padding. The tail is padding.
    runs = torch.stack([prompts - 1, lengths, torch.ones_like(prompts), padding], dim=1)
    if tail:
        runs = torch.cat([runs, runs.new_tensor([[0, 0, 0, tail]])])
    padded = runs.sum(1)
    borders = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    mine = local_positions(borders.to(device), context_rank, context_size) if context_size > 1 else None
    return MicroBatch(
        **_per_token([row.to(device) for row in rows_of_four_bytes], runs.to(device), len(rows), mine),
        borders=borders.to(device, torch.int32),
        longest=int(padded.max()),
        lengths=lengths.to(device),
        advantages=sequences.advantages[chosen].to(device),
        sample_index=sequences.index[chosen].to(device),
        totals=totals,
    )


def _rows(sequences: Sequences, chosen: Tensor, padding: Sequence[int], tail: int) -> list[Tensor]:
    """Tokens, labels and sampled log-probs of the whole row: runs of the flat arrays, copied once."""
    prompts, lengths = sequences.prompt_lengths, sequences.lengths
    sizes = [size[chosen].tolist() for size in (prompts, lengths)]
    ends = [size.cumsum(0)[chosen].tolist() for size in (prompts + lengths, lengths)]
    longest = max([tail, *sizes[0], *(count + 1 for count in padding)])
    no_token, no_log_prob = sequences.tokens.new_zeros(longest), sequences.log_probs.new_zeros(longest)
    tokens, labels, sampled = [no_token[:0]], [no_token[:0]], [no_log_prob[:0]]
    for prompt, length, end, sampled_end, count in zip(*sizes, *ends, padding, strict=True):
        first = end - prompt - length
        tokens += [sequences.tokens[first:end], no_token[:count]]
        labels += [sequences.tokens[first + 1 : end], no_token[: count + 1]]
        log_probs = sequences.log_probs[sampled_end - length : sampled_end]
        sampled += [no_log_prob[: prompt - 1], log_probs, no_log_prob[: count + 1]]
    return [
        torch.cat([*tokens, no_token[:tail]]),
        torch.cat([*labels, no_token[:tail]]),
        torch.cat([*sampled, no_log_prob[:tail]]),
    ]


def _per_token(rows: Sequence[Tensor], runs: Tensor, nobody: int, mine: Tensor | None) -> dict[str, Any]:
    """The fields of a :class:`MicroBatch` that have t entries.

    Args:
        rows: tokens, labels and sampled log-probs of the whole row.
        runs: [n, 4] tokens of each sequence, and of the tail, by what they are.
        nobody: the segment of padding.
        mine: positions of the whole row that this rank holds; None: all.
    """
    size = len(rows[0])
    run = torch.repeat_interleave(runs.flatten().int(), output_size=size)
    place = torch.arange(size, device=run.device) if mine is None else mine
    if mine is not None:
        rows, run = [row.index_select(0, mine) for row in rows], run.index_select(0, mine)
    tokens, labels, sampled = rows
    number = torch.arange(len(runs), device=run.device)
    segment = torch.stack([number, number, number, torch.full_like(number, nobody)], dim=1)
    padded = runs.sum(1)
    start = (padded.cumsum(0) - padded)[:, None].expand(-1, 4)
    mask = torch.tensor([False, True, False, False], device=run.device).expand(len(runs), 4)

    def of_run(values: Tensor) -> Tensor:
        return values.flatten().index_select(0, run)

    return {
        "tokens": tokens.long()[None],
        "position_ids": (place - of_run(start))[None],
        "labels": labels.long(),
        "mask": of_run(mask),
        "segment": of_run(segment),
        "sampled_log_probs": sampled,
    }
