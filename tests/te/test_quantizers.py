"""The quantisers in plain torch against Transformer Engine's reference, and the format's definition."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_fspo.lab.calibrate.fp8_values import E4M3, E5M2, block_shape, quantize, through_fp8

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_32_share_the_least_power_of_two_with_which_none_saturates(dtype: torch.dtype) -> None:
    assert block_shape("mxfp8", weight=True) == block_shape("mxfp8", weight=False) == (1, 32)
    largest = torch.finfo(dtype).max
    for values in list(tensors())[:4]:
        found, inverse = quantize(values, "mxfp8", dtype=dtype)
        for i in range(0, values.shape[0], 7):
            for j in range(0, values.shape[1], 32):
                block = values[i, j : j + 32].float()
                (scale,) = inverse[i, j : j + 32].unique().tolist()
                mantissa, _ = math.frexp(scale)
                assert mantissa == 0.5
                assert scale / 2 < block.abs().max().item() / largest <= scale
                assert same(found[i, j : j + 32], (block / scale).to(dtype))


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_blocks_of_the_lane_lie_along_what_each_product_sums_over(recipe: str) -> None:
    """A linear layer of Transformer Engine against its three products by hand.

    Features and tokens are of sizes so far apart that a block across them would lose the small ones.
    """
    import fake_recipes
    import transformer_engine.pytorch as engine
    from transformer_engine.common.recipe import CustomRecipe

    import megatron_fspo.mcore.backend  # noqa: F401 - from here on cuda means the CPU

    generator = torch.Generator().manual_seed(1)
    layer = engine.Linear(64, 96, bias=False, params_dtype=torch.float32, device="cpu")
    x, dy = (torch.randn(80, size, generator=generator) for size in (64, 96))
    for values in (x, dy):
        values[::2] *= 1e-7
        values[:, ::2] *= 1e-7
    x.requires_grad_()
    with engine.autocast(recipe=CustomRecipe(qfactory=fake_recipes.Factory(recipe, hybrid=False))):
        y = layer(x)
    y.backward(dy)
    weight = layer.weight.detach()

    def product(a: Tensor, b: Tensor, *, weight: bool = False) -> Tensor:
        """a bᵀ, summed over the last dimension of both."""
        return through_fp8(a, recipe) @ through_fp8(b, recipe, weight=weight).t()

    def close(found: Tensor | None, want: Tensor) -> bool:
        """True if equal within the size of rows and columns."""
        assert found is not None
        rows, columns = want.abs().amax(1, keepdim=True), want.abs().amax(0, keepdim=True)
        return bool(((found - want).abs() <= 1e-4 * rows * columns / want.abs().max()).all())

    assert close(y, product(x.detach(), weight, weight=True))
    assert close(x.grad, product(dy, weight.t(), weight=True))
    assert close(layer.weight.grad, product(dy.t(), x.detach().t()))
    across = through_fp8(dy, recipe).t() @ through_fp8(x.detach(), recipe)
    assert not close(layer.weight.grad, across), "the test would not see blocks that lie across"
