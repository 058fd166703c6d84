"""The backend under test: the CPU, the GPUs (``make test-gpu``), or a fake one (``make test-te``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

import torch

from megatron_fspo.config import Parallel

BACKEND: Literal["cpu", "cuda"] = "cuda" if os.environ.get("TEST_BACKEND") == "cuda" else "cpu"
LAYERS: Literal["auto", "local"] = "local" if os.environ.get("TEST_LAYERS") == "local" else "auto"
ENGINE = BACKEND == "cuda" and LAYERS == "auto"
"""True if layers are Transformer Engine's."""
FAKE = "fake_gpu" in sys.modules
"""True if the GPU is the fake one of tests/te/fake."""
RANKS = torch.cuda.device_count() if BACKEND == "cuda" and not FAKE else 8
"""The most that a test may start: NCCL wants a GPU for each."""


def supported(layouts: dict[str, Parallel], but: Sequence[str] = ()) -> dict[str, Parallel]:
    """Layouts that the backend has: in float32 Transformer Engine has no attention under context parallel.

    Args:
        but: names of others that layers of Transformer Engine leave out for the sake of time.
    """
    return {
        name: layout
        for name, layout in layouts.items()
        if not (ENGINE and (layout.context > 1 or name in but))
    }


def fitting(layouts: dict[int, dict[str, Parallel]]) -> dict[int, dict[str, Parallel]]:
    """World size → layouts: of the worlds that this machine has GPUs for."""
    return {world: named for world, named in layouts.items() if world <= RANKS}
