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


def walks(count: int, *, sigma: float = 0.02, longest: int = 200) -> list[dict[str, Any]]:
    """Rows with L, S ~ Normal(0, σ²L) and A in {-1, 0, 1}."""
    generator = torch.Generator().manual_seed(0)
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


def fair_rows(prompts: int, samples: int, times: int, *, seed: int) -> list[dict[str, Any]]:
    """Rows of responses to several prompts in several updates, |S|/√L of which has one distribution; most of
    it is the same in the ``times`` rows of a response, and half of it in the responses to a prompt."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    prompt = torch.arange(prompts).repeat_interleave(samples)
    lengths = (10 * 15 ** torch.rand(len(prompt), generator=generator)).long().tolist()
    own = 0.7 * normal(prompts)[prompt] + 0.7 * normal(len(prompt))
    rows = []
    for _ in range(times):
        z = (0.95 * own + 0.3 * normal(len(own))).tolist()
        sums = [0.02 * math.sqrt(length) * value for length, value in zip(lengths, z, strict=True)]
        rows += [
            {"prompt": number, "length": length, "log_ratio_sum": s, "advantage": 1.0}
            for number, length, s in zip(prompt.tolist(), lengths, sums, strict=True)
        ]
    return rows


def token_rows(count: int) -> list[dict[str, Any]]:
    """Rows with token log-probs of both policies and the sampler, whose S are those of walks."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        length = int(torch.randint(2, 40, (1,), generator=generator))
        old = -torch.rand(length, generator=generator, dtype=torch.float64) - 1.0
        step, gap = torch.randn(2, length, generator=generator, dtype=torch.float64)
        rows.append(
            {
                "old_log_probs": old.tolist(),
                "log_probs": (old + 0.02 * step).tolist(),
                "sampled_log_probs": (old - 0.01 * gap).tolist(),
                "advantage": float(number % 3 - 1),
            }
        )
    return rows
