"""FP8 recipes without a GPU: Transformer Engine's interface for quantisers of one's own, in torch.

``tensorwise`` is its reference quantiser. ``blockwise`` and ``mxfp8``, of which it has kernels only, quantise
by :mod:`megatron_fspo.lab.calibrate.fp8_values`. Blocks lie along what a product sums over, so a tensor has
two copies: rows for the forward pass and gradients of activations, columns, quantised from the same
high-precision values, for gradients of weights. Products are those of the dequantised values, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
)


def recipe_of(config: Any) -> CustomRecipe:
    """Stands in for ``megatron.core.fp8_utils.get_fp8_recipe``, for Megatron's configuration."""
    return CustomRecipe(qfactory=Factory(str(config.fp8_recipe), config.fp8 == "hybrid"))


@dataclass(frozen=True)
class Factory:
    """Makes the quantiser of each factor of a product; goes into checkpoints."""

    recipe: str
    hybrid: bool

    def __call__(self, role: Any) -> CurrentScalingQuantizerRef:
        kind = "" if role is None else role.tensor_type
        dtype = torch.float8_e5m2 if self.hybrid and kind == "grad_output" else torch.float8_e4m3fn
        if self.recipe == "tensorwise":
            return CurrentScalingQuantizerRef(dtype)
        assert self.recipe in ("blockwise", "mxfp8"), self.recipe
        return BlockQuantizer(dtype, self.recipe, weight=kind == "weight")


class BlockTensor(CurrentScalingTensorRef):
    """FP8 values, and the number that each is to be multiplied by."""

    def _create_transpose(self) -> None:
        raise AssertionError("columns have blocks of their own: rows cannot be transposed")


class BlockQuantizer(CurrentScalingQuantizerRef):
    """Quantizers by blocks."""

    def __init__(self, dtype: torch.dtype, recipe: str, *, weight: bool) -> None:
        super().__init__(dtype)
        self._recipe, self._weight = recipe, weight

    def _quantize(self, tensor: Tensor) -> tuple[Tensor | None, ...]:
        none = (None, None)
        rows = self._values(tensor) if self.rowwise_usage else none
        # A cached weight that a pass without gradients made would have no columns in the next pass.
        columns = self._values(tensor.t()) if self.columnwise_usage or self._weight else none
        return *rows, *columns

    def _values(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        from megatron_fspo.lab.calibrate.fp8_values import (
            quantize,  # which imports Megatron, which is on its way
        )

        return quantize(tensor, self._recipe, weight=self._weight, dtype=self.dtype)

    def quantize(self, tensor: Tensor, **_: Any) -> BlockTensor:
        found = super().quantize(tensor)
        return BlockTensor(**{field.name: getattr(found, field.name) for field in fields(found)})

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        product = (qx.float() * sx) @ (qw.float() * sw).t()
        return (product if bias is None or not bias.numel() else product + bias.float()).to(out_dtype)
