"""FP8 by the recipes' rules: scales, rounding, what depends on what; and models that are to imitate it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from launch import found_by
from megatron_fspo.lab.calibrate.fp8_values import E4M3, E5M2, quantize, through_fp8

RECIPES = ("tensorwise", "blockwise", "mxfp8")


def matrix(rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (torch.randn(rows, 1, generator=generator) * 3).exp()
    return torch.randn(rows, columns, generator=generator) * sizes * spread


def nearest(value: float, scale: float) -> float:
    """The E4M3 number next to value · scale, ties to even, divided by the scale again; by search."""
    steps = [m / 8 * 2.0**-6 for m in range(8)]
    steps += [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
    wanted = min(abs(value) * scale, 448.0)
    best = min(steps, key=lambda s: (abs(s - wanted), steps.index(s) % 2))
    return math.copysign(best / scale, value)


@given(rows=st.integers(1, 5), columns=st.integers(1, 300), seed=st.integers(0, 99), weight=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_value_is_the_nearest_of_its_block(rows: int, columns: int, seed: int, weight: bool) -> None:
    x = matrix(rows, columns, seed, spread=10.0 ** (seed % 9 - 4))
    for recipe, (height, width) in {
        "tensorwise": (rows, columns),
        "blockwise": (128 if weight else 1, 128),
        "mxfp8": (1, 32),
    }.items():
        found = through_fp8(x, recipe, weight=weight)
        place = seed % rows, (seed * 7) % columns
        top, left = place[0] // height * height, place[1] // width * width
        amax = x[top : top + height, left : left + width].abs().max().item()
        scale = 448.0 / amax
        if recipe == "blockwise":
            scale = 2.0 ** math.floor(math.log2(scale))
        elif recipe == "mxfp8":
            scale = 2.0 ** -math.ceil(math.log2(amax / 448.0))
        assert found[place].item() == pytest.approx(nearest(x[place].item(), scale), rel=2e-6, abs=1e-30)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zeros_stay_and_nothing_overflows(recipe: str, dtype: torch.dtype) -> None:
    x = torch.zeros(4, 256)
    values, inverse = quantize(x, recipe, dtype=dtype)
    assert values.dtype == dtype and torch.equal(values.float() * inverse, x)
    x[1, 5], x[2, 200] = 3e38, 1e-38
    found = through_fp8(x, recipe, dtype=dtype)
    assert found.isfinite().all() and found[1, 5] > 2.5e38


def test_rows_may_have_more_dimensions() -> None:
    x = matrix(6, 64, 3).bfloat16()
    found = through_fp8(x.view(3, 2, 64), "mxfp8")
    assert found.dtype == torch.bfloat16 and torch.equal(found.view(6, 64), through_fp8(x, "mxfp8"))


def test_a_model_imitates_what_fp8_does_to_its_matrices(
    tmp_path: Path, random_checkpoints: dict[str, Path]
) -> None:
    """Against transformers with the same quantizers around its linear layers, in TP2 with SP and PP2."""
    worker = Path(__file__).with_name("emulate_worker.py")
    found = found_by(worker, tmp_path, str(random_checkpoints["untied"]), nproc=2)
    for layout, errors in found.items():
        assert errors["matrices"] == 4 * 4, layout  # of four layers
        assert errors["against transformers"] < 2e-4, layout
        assert errors["against no FP8"] > 0.01, layout
        # One layer at either end in high precision: less noise, fewer matrices.
        assert errors["matrices, ends in bf16"] == 4 * 2, layout
        assert 0 < errors["ends in bf16"] < errors["against no FP8"], layout
