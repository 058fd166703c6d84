"""The quantisers in plain torch against Transformer Engine's reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fspo.config.fp8 import FP8
from megatron_fspo.lab.calibrate.fp8_values import E4M3, E5M2, quantize

DTYPES = [E4M3, E5M2]


def tensors() -> Iterator[Tensor]:
    """Normal, heavy-tailed, tiny, zero in part; sizes that are no multiples of a block."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(144, 272, generator=generator)
    spread = normal * torch.randn(144, 272, generator=generator).mul(4).exp()
    zero = normal.clone()
    zero[:, 128:] = 0
    for wide in (normal, spread, normal * 1e-36, zero, torch.zeros(16, 16)):
        yield wide
        yield wide.bfloat16()


def reference(values: Tensor, dtype: torch.dtype, *, powers: bool) -> tuple[Tensor, Tensor]:
    """Transformer Engine's, with one scale."""
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    found = CurrentScalingQuantizerRef(dtype, columnwise=False, pow_2_scales=powers).quantize(values)
    return found.data, found.scale


def same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_scale_per_tensor_is_the_reference_to_the_bit(dtype: torch.dtype) -> None:
    for values in tensors():
        found, inverse = quantize(values, "tensorwise", dtype=dtype)
        want, scale = reference(values, dtype, powers=False)
        assert same(found, want) and inverse == scale


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_block_is_the_reference_with_a_power_of_two(dtype: torch.dtype, weight: bool) -> None:
    rows, columns = (128, 128) if weight else (1, 128)
    for values in tensors():
        found, inverse = quantize(values, "blockwise", weight=weight, dtype=dtype)
        assert inverse.shape == values.shape
        # One row in seven is enough where each row is a block of its own.
        for i in range(0, values.shape[0], rows if weight else 7):
            for j in range(0, values.shape[1], columns):
                here = slice(i, i + rows), slice(j, j + columns)
                want, scale = reference(values[here], dtype, powers=True)
                assert same(found[here], want) and inverse[here].unique() == scale


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_rows_of_a_rank_are_gathered_in_fp8(recipe: Any) -> None:
    """Under sequence parallel, of packs that are as small as can be. One scale per tensor takes any rows."""
    import transformer_engine.pytorch as engine

    e4m3, both = engine.DType.kFloat8E4M3, {"rowwise": True, "columnwise": True}
    quantizers = {
        "blockwise": lambda: engine.Float8BlockQuantizer(e4m3, block_scaling_dim=1, **both),
        "mxfp8": lambda: engine.MXFP8Quantizer(e4m3, **both),
    }
    assert quantizers[recipe]().is_quantizable(torch.empty(FP8(recipe=recipe).align, 1, 4096))
