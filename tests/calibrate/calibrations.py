"""A measurement made up: two comparisons, 160 responses to 40 prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.calibrate.command import make_calibration
from megatron_fspo.lab.calibrate.passes import Kind, Measured, PassDifference
from megatron_fspo.trainer.noise import Calibration

SIGMA = {"updates": 0.04, "sampler": 0.01}
DRIFT = {"updates": -0.001, "sampler": -0.0005}


def config(*overrides: str) -> Config:
    words = ["--model.dtype", "bfloat16", *overrides]
    return load_config(REPO / "examples/make_sum/run.toml", words)


def measured(seed: int = 0, sequences: int = 160, **changes: Any) -> Measured:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 400, (sequences,), generator=generator)
    lengths[3] = 0

    def difference(kind: Kind, precision: str = "bfloat16") -> PassDifference:
        z = torch.randn(sequences, generator=generator, dtype=torch.float64)
        sums = SIGMA.get(kind, 0) * lengths.sqrt() * z + DRIFT.get(kind, 0) * lengths
        emulated, flips = precision == "blockwise", torch.zeros(2, sequences)
        return PassDifference(kind=kind, precision=precision, emulated=emulated, sums=sums, flips=flips)

    updates = torch.randn(sequences, generator=generator, dtype=torch.float64) * 0.05 * lengths.sqrt()
    kinds: list[Kind] = ["repeat", "packs", "sampler", "updates"]
    differences = [*map(difference, kinds), difference("updates", "blockwise")]
    groups = torch.arange(sequences) // 4
    found = {"lengths": lengths, "groups": groups, "differences": differences}
    return Measured(**{**found, "first_updates": (updates, lengths, groups), **changes})


@cache
def calibration() -> Calibration:
    """Of :func:`measured`; its intervals take a second to resample."""
    return make_calibration(measured(), config(), device="cpu")
