"""A few samples, and what both files of tests need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_fspo.types import Sample
from megatron_fspo.verify.cases import random_samples
from megatron_fspo.weights import Architecture, read_architecture

SHAPES = [(1, 1), (3, 40), (5, 2), (2, 0), (4, 17)]  # tokens of prompt and response


def samples() -> list[Sample]:
    return random_samples(SHAPES, vocab_size=37, seed=3)


def load(checkpoint: Path) -> tuple[dict[str, Tensor], Architecture]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {k: v.double().requires_grad_() for k, v in tensors.items()}, read_architecture(checkpoint)


def random_rows(lengths: Sequence[int], scale: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) * scale for n in lengths]


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()
