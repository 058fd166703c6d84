"""Dumps as other trainers would write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).with_name("recorded")
"""The first steps of runs of examples/smollm2, as the trainer wrote them: sequences and metrics."""
LIMITS: Mapping[str, Sequence[str]] = {
    "fspo": ("--fspo.c-low", "0.06", "--fspo.c-high", "0.06"),
    "gspo": ("--gspo.eps-low", "0.0151", "--gspo.eps-high", "0.0153"),
    "rloo": ("--rloo.eps-low", "0.212", "--rloo.eps-high", "0.269"),
}
"""Of these runs, by loss."""


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def walks(count: int, *, seed: int = 0, sigma: float = 0.02, longest: int = 200) -> list[dict[str, Any]]:
    """Rows with L, S ~ Normal(0, σ²L) and A in {-1, 0, 1}."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, longest, (count,), generator=generator).tolist()
    z = torch.randn(count, generator=generator, dtype=torch.float64).tolist()
    return [
        {
            "length": length,
            "log_ratio_sum": sigma * math.sqrt(length) * value,
            "advantage": float(number % 3 - 1),
            "reward": float(number % 2),
        }
        for number, (length, value) in enumerate(zip(lengths, z, strict=True))
    ]


def fair_rows(
    prompts: int, samples: int, times: int, *, seed: int, in_tokens: float = 0.0
) -> list[dict[str, Any]]:
    """Rows of responses to several prompts in several updates, |S|/√L of which has one distribution.

    Args:
        times: rows of each response, in each of which most of S is the same.
        in_tokens: the signal that all responses to a prompt share, in rows with token log-probs; 0 for
            rows with S alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    prompt = torch.arange(prompts).repeat_interleave(samples)
    lengths = (10 * 15 ** torch.rand(len(prompt), generator=generator)).long()
    shared = normal(prompts)[prompt] if samples > 1 else normal(len(prompt))
    own = 0.7 * shared + 0.7 * normal(len(prompt))
    rows = []
    for time in range(times):
        z = 0.95 * own + 0.3 * normal(len(prompt))
        for number, length in enumerate(lengths.tolist()):
            row = {"prompt": int(prompt[number]), "advantage": 1.0, "step": time}
            if in_tokens:
                tokens = 0.02 * normal(length) + in_tokens * float(shared[number])
                row |= {"log_probs": (tokens - 9).tolist(), "old_log_probs": [-9.0] * length}
            else:
                row |= {"length": length, "log_ratio_sum": 0.02 * math.sqrt(length) * float(z[number])}
            rows.append(row)
    return rows


def token_rows(count: int, *, seed: int = 0, longest: int = 40, signal: float = 0.0) -> list[dict[str, Any]]:
    """Rows with token log-probs of both policies and the sampler, whose S are those of walks, and with
    ``signal`` of something that all tokens of a response share."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(2, longest, (1,), generator=generator))
        old = -torch.rand(length, generator=generator, dtype=torch.float64) - 1.0
        step, gap = torch.randn(2, length, generator=generator, dtype=torch.float64)
        if signal:
            step = step + signal / 0.02 * torch.randn((), generator=generator, dtype=torch.float64)
        rows.append(
            {
                "old_log_probs": old.tolist(),
                "log_probs": (old + 0.02 * step).tolist(),
                "sampled_log_probs": (old - 0.01 * gap).tolist(),
                "advantage": float(number % 3 - 1),
            }
        )
    return rows
