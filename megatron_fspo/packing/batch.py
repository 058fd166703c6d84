"""From samples to the packed tensors of one micro-batch (THD: all sequences in one row, end to end)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_fspo.packing.zigzag import local_positions
from megatron_fspo.types import Sample


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
    num_sequences: int
    """N: sequences with a response, of the whole optimizer step over all ranks."""
    num_tokens: int
    """T: response tokens of the whole optimizer step over all ranks."""


def sample_length(sample: Sample, *, context: int = 1) -> int:
    """Tokens a sample takes in a pack, with the padding of ``context`` parallel ranks."""
    length = len(sample.prompt.token_ids) + len(sample.completion.token_ids)
    return length + -length % _chunks(context)


def collate(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    num_sequences: int,
    num_tokens: int,
    context_rank: int = 0,
    context_size: int = 1,
    multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack ``samples[i] for i in indices``, and keep the tokens of one context-parallel rank.

    Args:
        num_sequences, num_tokens: N and T of the whole optimizer step, see :class:`MicroBatch`.
        context_rank, context_size: which rank of how many; its tokens are those of :mod:`.zigzag`.
        multiple_of: make t a multiple of this (tensor parallel size under sequence parallel). An empty
            micro-batch becomes one tail, so that every rank runs the same collectives.
    """
    row = _Row(nobody=len(indices))
    for number, index in enumerate(indices):
        row.append(number, samples[index], pad_to=_chunks(context_size))
    # A tail must split into chunks as well; the rank's share of the whole row is what multiple_of is about.
    step = math.lcm(_chunks(context_size), context_size * multiple_of)
    row.pad(-len(row.tokens) % step if row.tokens else step)
    mine = local_positions(row.borders, context_rank, context_size)

    def local(values: list[int] | list[bool] | list[float], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor([values[i] for i in mine], dtype=dtype, device=device)

    lengths = [len(samples[i].completion.token_ids) for i in indices]
    return MicroBatch(
        tokens=local(row.tokens)[None],
        position_ids=local(row.positions)[None],
        labels=local(row.labels),
        mask=local(row.mask),
        segment=local(row.segment),
        borders=torch.tensor(row.borders, dtype=torch.int32, device=device),
        longest=max(end - first for first, end in pairwise(row.borders)),
        lengths=torch.tensor(lengths, dtype=torch.long, device=device),
        advantages=torch.tensor([samples[i].advantage for i in indices], dtype=torch.float32, device=device),
        sample_index=torch.tensor(list(indices), dtype=torch.long, device=device),
        sampled_log_probs=local(row.sampled, torch.float32),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )


def _chunks(context: int) -> int:
    """Chunks that every sequence is cut into."""
    return 2 * context if context > 1 else 1


class _Row:
    """The whole row under construction."""

    def __init__(self, nobody: int) -> None:
        self.nobody = nobody
        self.tokens: list[int] = []
        self.labels: list[int] = []
        self.mask: list[bool] = []
        self.segment: list[int] = []
        self.positions: list[int] = []
        self.sampled: list[float] = []
        self.borders = [0]

    def append(self, number: int, sample: Sample, *, pad_to: int) -> None:
        """Add a sequence, padded at its end."""
        prompt, response = sample.prompt.token_ids, sample.completion.token_ids
        ids = [*prompt, *response]
        self.tokens += ids
        self.labels += [*ids[1:], 0]
        self.mask += [False] * (len(prompt) - 1) + [True] * len(response) + [False]
        self.sampled += [0.0] * (len(prompt) - 1) + [*sample.completion.log_probs] + [0.0]
        self.segment += [number] * len(ids)
        self.positions += range(len(ids))
        self._fill(-len(ids) % pad_to, first_position=len(ids))
        self.borders.append(len(self.tokens))

    def pad(self, count: int) -> None:
        """Add a tail of ``count`` tokens."""
        if count:
            self._fill(count, first_position=0)
            self.borders.append(len(self.tokens))

    def _fill(self, count: int, *, first_position: int) -> None:
        self.tokens += [0] * count
        self.labels += [0] * count
        self.mask += [False] * count
        self.sampled += [0.0] * count
        self.segment += [self.nobody] * count
        self.positions += range(first_position, first_position + count)
