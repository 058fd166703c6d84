"""Samples of given lengths with random tokens, for whatever scores or trains on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fspo.types import Completion, Prompt, Sample


def random_samples(shapes: Sequence[tuple[int, int]], *, vocab: int, seed: int) -> list[Sample]:
    """One sample for each (prompt, response) length in tokens; advantages of both signs, no two alike."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    return [
        Sample(
            prompt=Prompt(index=i, token_ids=ids(p), text="", answer=""),
            number=0,
            completion=Completion(
                token_ids=ids(n), log_probs=(0.0,) * n, finish_reason="length", weight_version=0
            ),
            reward=0.0,
            advantage=(-1.0) ** i * (1 + i / 10),
        )
        for i, (p, n) in enumerate(shapes)
    ]
