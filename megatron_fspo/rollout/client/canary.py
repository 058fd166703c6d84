"""Proof that a server computes the trainer's model: both score the same fixed sequences.

A wrong one can answer as fluently as the right one. (vLLM on a CPU kept the old head of models that tie it to
the embedding, and said nothing.) Which version of the weights it has is for :mod:`.statistics` to prove: an
update at bf16 and a learning rate of 1e-5 moves log-probs by less than the tolerance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.client.server import Server

COUNT, LENGTH = 4, 24
FACTOR = 8.0
"""How much further apart equal weights may score later than they did at first."""
FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Tolerance that every model gets, in nats. bf16 rounds every activation, differently on each side."""
CAP = {torch.float32: 1e-2, torch.bfloat16: 1.0}
"""Tolerance that no model gets: a layer in another's place moves a canary by more."""

ANSWER_SECONDS = 600.0
"""Responses that were frozen during the update are served first."""


class WrongWeights(TrainingError):
    """A server has other weights than the trainer, or computes otherwise with them."""

    def __init__(self, server: str, version: int, how: str) -> None:
        super().__init__(
            f"{server} does not have the trainer's weights after the update to version {version}: {how}"
        )


def canary_sequences(vocab_size: int, max_length: int) -> list[tuple[int, ...]]:
    """Random token ids, the same in every run of a model."""
    generator = torch.Generator().manual_seed(0)
    shape = (COUNT, min(LENGTH, max_length - 1))
    return [tuple(row) for row in torch.randint(vocab_size, shape, generator=generator).tolist()]


async def ask(server: Server, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Per sequence of n tokens, the server's log-probs [n - 1] of all but the first."""
    rows = await asyncio.gather(*(server.score(ids, timeout=ANSWER_SECONDS) for ids in sequences))
    return [torch.tensor(row) for row in rows]


def tolerance(rounding: float, dtype: torch.dtype) -> float:
    """Largest |Δ log-prob| of a token that passes for equal weights, in nats.

    Args:
        rounding: the largest between trainer and servers on weights known to be equal; 0 if none are.
        dtype: of the trainer's weights.
    """
    return min(CAP[dtype], max(FLOOR[dtype], FACTOR * rounding))


def largest_difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest |Δ log-prob| of a token, in nats."""
    return (torch.cat(list(got)) - torch.cat(list(want))).abs().max().item()


def problem(got: Sequence[Tensor], want: Sequence[Tensor], allowed: float) -> str:
    """What is wrong where the largest |Δ log-prob| is beyond what is allowed, or not a number; else ""."""
    largest = largest_difference(got, want)
    if largest <= allowed:
        return ""
    difference = (torch.cat(list(got)) - torch.cat(list(want))).abs()
    return (
        f"log-probs of {difference.numel()} canary tokens differ by up to {largest:.3g} nats, on average by "
        f"{difference.mean():.3g}; {allowed:.3g} is allowed"
    )
