"""Sequences as flat arrays on the CPU, 8 bytes per token, until a pack needs them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Row = Tensor | Sequence[int] | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """m sequences, each a prompt with its response, laid end to end.

    They may be a part of those of the step: what a rank of a data-parallel job holds.

    Example::

        Sequences.of(prompts=[[9], [1, 2]], responses=[[8], [3, 0, 5]], advantages=[1.0, -1.0])
    """

    index: Tensor
    """[m] number of each in the step (or the whole rollout): what packs name it by."""
    tokens: Tensor
    """[Σ (P + L)] int32 ids, prompt and response of the first, of the second, …"""
    log_probs: Tensor
    """[Σ L] fp32 the sampler's log-probs of the response tokens, in nats; 0 where there was no sampler."""
    prompt_lengths: Tensor
    """[m] P ≥ 1."""
    lengths: Tensor
    """[m] L ≥ 0, tokens of the response."""
    advantages: Tensor
    """[m] fp32."""

    @cached_property
    def places(self) -> Tensor:
        """[m, 4] P, L, and where tokens and log-probs of each begin."""
        whole = self.prompt_lengths + self.lengths
        begins = (whole.cumsum(0) - whole, self.lengths.cumsum(0) - self.lengths)
        return torch.stack([self.prompt_lengths, self.lengths, *begins], dim=1)

    @classmethod
    def of(
        cls,
        *,
        prompts: Sequence[Row],
        responses: Sequence[Row],
        advantages: Sequence[float] | Tensor,
        log_probs: Sequence[Row] | None = None,
        index: Sequence[int] | None = None,
    ) -> Sequences:
        """From one row of ids per prompt and per response.

        Args:
            log_probs: one row per response; none for responses that no sampler wrote.
            index: numbers of the sequences in the step; by default they are all of it.

        Raises:
            ValueError: an empty prompt, or rows that do not fit each other.
        """
        prompt_lengths = torch.tensor([len(row) for row in prompts], dtype=torch.long)
        lengths = torch.tensor([len(row) for row in responses], dtype=torch.long)
        if not len(prompts) == len(responses) == len(advantages):
            raise ValueError(
                f"{len(prompts)} prompts, {len(responses)} responses, {len(advantages)} advantages"
            )
        if (prompt_lengths == 0).any():
            raise ValueError(f"prompt {int((prompt_lengths == 0).nonzero()[0])} has no token")
        sampled = torch.zeros(int(lengths.sum())) if log_probs is None else _flat(log_probs, torch.float32)
        if log_probs is not None and [len(row) for row in log_probs] != lengths.tolist():
            raise ValueError("a response and its log-probs differ in length")
        pairs = [row for pair in zip(prompts, responses, strict=True) for row in pair]
        return cls(
            index=torch.arange(len(prompts)) if index is None else torch.tensor(index, dtype=torch.long),
            tokens=_flat(pairs, torch.int32),
            log_probs=sampled,
            prompt_lengths=prompt_lengths,
            lengths=lengths,
            advantages=torch.as_tensor(advantages, dtype=torch.float32),
        )


def as_row(row: Row, dtype: torch.dtype) -> Tensor:
    """A row as a tensor; an ``array`` or tensor of that type is not copied."""
    if isinstance(row, Tensor):
        return row.to("cpu", dtype)
    if isinstance(row, array) and len(row):
        return torch.frombuffer(row, dtype=_ARRAYS[row.typecode]).to(dtype)
    return torch.tensor(row, dtype=dtype)


_ARRAYS: dict[str, Any] = {"i": torch.int32, "f": torch.float32}


def _flat(rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *(as_row(row, dtype) for row in rows)])
