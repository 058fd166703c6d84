"""From samples to the packed tensors of one micro-batch (THD: all sequences in one row, end to end)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_fspo.types import Sample


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """n sequences packed into t tokens, on one device.

    Position i of a row predicts token i + 1 of the same sequence, so ``labels`` is ``tokens`` shifted left
    within each sequence, and the mask is true where the label is a token of a response. A tail that pads t
    to a multiple is one more sequence for the attention, outside every mask.
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
    """[t] sequence of each token, in [0, n); n in the tail."""
    borders: Tensor
    """[n + 1] or, with a tail, [n + 2] int32: cumulative sequence lengths from 0."""
    longest: int
    """Longest sequence (or tail), in tokens."""
    lengths: Tensor
    """[n] response lengths."""
    advantages: Tensor
    """[n] fp32."""
    sample_index: Tensor
    """[n] which sample of the rollout."""
    old_log_probs: Tensor | None
    """[t] log-probs of the labels before this rollout's first update; None: the same as the new ones."""
    num_sequences: int
    """N: sequences with a response, of the whole optimizer step over all ranks."""
    num_tokens: int
    """T: response tokens of the whole optimizer step over all ranks."""


def sample_length(sample: Sample) -> int:
    """Tokens a sample takes in a pack."""
    return len(sample.prompt.token_ids) + len(sample.completion.token_ids)


def collate(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    num_sequences: int,
    num_tokens: int,
    multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack ``samples[i] for i in indices``.

    Args:
        num_sequences, num_tokens: N and T of the whole optimizer step, see :class:`MicroBatch`.
        multiple_of: pad t to a multiple of this (tensor parallel size under sequence parallel). An empty
            micro-batch becomes one tail of this length, so that every rank runs the same collectives.
    """
    tokens: list[int] = []
    labels: list[int] = []
    mask: list[bool] = []
    segment: list[int] = []
    positions: list[int] = []
    borders = [0]
    for number, index in enumerate(indices):
        prompt = samples[index].prompt.token_ids
        response = samples[index].completion.token_ids
        ids = [*prompt, *response]
        tokens += ids
        labels += [*ids[1:], 0]
        mask += [False] * (len(prompt) - 1) + [True] * len(response) + [False]
        segment += [number] * len(ids)
        positions += range(len(ids))
        borders.append(len(tokens))
    tail = -len(tokens) % multiple_of if tokens else multiple_of
    if tail:
        tokens += [0] * tail
        labels += [0] * tail
        mask += [False] * tail
        segment += [len(indices)] * tail
        positions += range(tail)
        borders.append(len(tokens))
    lengths = [len(samples[i].completion.token_ids) for i in indices]
    return MicroBatch(
        tokens=torch.tensor([tokens], device=device),
        position_ids=torch.tensor([positions], device=device),
        labels=torch.tensor(labels, device=device),
        mask=torch.tensor(mask, device=device),
        segment=torch.tensor(segment, device=device),
        borders=torch.tensor(borders, dtype=torch.int32, device=device),
        longest=max(end - first for first, end in pairwise(borders)),
        lengths=torch.tensor(lengths, dtype=torch.long, device=device),
        advantages=torch.tensor([samples[i].advantage for i in indices], dtype=torch.float32, device=device),
        sample_index=torch.tensor(list(indices), dtype=torch.long, device=device),
        old_log_probs=None,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )
