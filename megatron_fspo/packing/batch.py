"""From sequences to the packed tensors of one micro-batch (THD: all sequences in one row, end to end)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.packing.sequences import Sequences
from megatron_fspo.packing.zigzag import chunks_per_sequence, local_rows


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
    padded = whole + -whole % chunks
    filled = int(padded.sum())
    # A tail must split into chunks as well; the rank's share of the whole row is what multiple_of is about.
    step = math.lcm(chunks, context_size * multiple_of)
    tail = -filled % step if filled else step
    if tail:
        prompts, lengths, whole = (torch.cat([x, x.new_zeros(1)]) for x in (prompts, lengths, whole))
        padded = torch.cat([padded, padded.new_tensor([tail])])
    # All that is per token happens on the device, from two flat copies of 4 bytes each.
    tokens = _slices(sequences.tokens, sequences.prompt_lengths + sequences.lengths, rows).to(device)
    sampled = _slices(sequences.log_probs, sequences.lengths, rows).to(device)
    borders = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    columns = torch.stack([prompts, lengths, whole, padded]).to(device)
    return MicroBatch(
        **_per_token(tokens, sampled, columns, context_rank, context_size, nobody=len(rows)),
        borders=borders.to(device, torch.int32),
        longest=int(padded.max()),
        lengths=lengths[: len(rows)].to(device),
        advantages=sequences.advantages[chosen].to(device),
        sample_index=sequences.index[chosen].to(device),
        totals=totals,
    )


def _per_token(
    tokens: Tensor,
    sampled: Tensor,
    columns: Tensor,
    context_rank: int,
    context_size: int,
    *,
    nobody: int,
) -> dict[str, Any]:
    """The fields of a :class:`MicroBatch` that have t entries.

    Args:
        tokens, sampled: the sequences one after the other, P + L entries each, and L.
        columns: [4, n] P, L, P + L and the padded length of each sequence, and of the tail.
        nobody: the segment of padding.
    """
    prompts, lengths, whole, padded = columns
    sequence, position = local_rows(padded, context_rank, context_size)
    place = (whole.cumsum(0) - whole)[sequence] + position
    real = position < whole[sequence]
    mask = (position >= prompts[sequence] - 1) & (position < whole[sequence] - 1)
    # One more entry, so that there is one to look up for what has none.
    tokens = torch.cat([tokens, tokens.new_zeros(1)])
    sampled = torch.cat([sampled, sampled.new_zeros(1)])
    response = (lengths.cumsum(0) - lengths - prompts + 1)[sequence] + position
    following = torch.where(position < whole[sequence] - 1, place + 1, len(tokens) - 1)
    return {
        "tokens": tokens[torch.where(real, place, len(tokens) - 1)].long()[None],
        "position_ids": position[None],
        "labels": tokens[following].long(),
        "mask": mask,
        "segment": torch.where(real, sequence, nobody),
        "sampled_log_probs": sampled[torch.where(mask, response, len(sampled) - 1)],
    }


def _slices(flat: Tensor, sizes: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of a flat array, one after the other."""
    ends = sizes.cumsum(0)
    return torch.cat([flat[:0], *(flat[ends[row] - sizes[row] : ends[row]] for row in rows)])
