"""FP8 by the rules of Transformer Engine's recipes, in plain torch: to look at its noise without a GPU.

Each factor [m, k] of a product, k being what is summed over, is divided into blocks that share a scale:

| recipe | a block of activations or gradients | of weights | scale |
|---|---|---|---|
| tensorwise | the whole tensor | the whole tensor | largest value / amax |
| blockwise | 1 × 128 | 128 × 128 | the same, rounded down to a power of two |
| mxfp8 | 1 × 32 | 1 × 32 | the same, a power of two by E8M0's rule |

Values are rounded to nearest even, and saturate. Source: Transformer Engine's recipes; the tests compare with
its reference quantiser where it has one (tensorwise).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(
    values: Tensor, recipe: str, *, weight: bool = False, dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """Return FP8 values [m, k], and the fp32 number to multiply each by, broadcastable to [m, k].

    Args:
        values: [m, k], finite.
        recipe: ``tensorwise``, ``blockwise`` or ``mxfp8``.
        weight: whether it is the factor that is a weight.
        dtype: E4M3 or E5M2.
    """
    # Rows and columns that share a scale.
    m, k = values.shape
    rows, columns = {"tensorwise": (m, k), "blockwise": (128 if weight else 1, 128), "mxfp8": (1, 32)}[recipe]
    wide = values.float()
    filled = F.pad(wide, (0, -k % columns, 0, -m % rows))
    blocks = filled.view(filled.shape[0] // rows, rows, filled.shape[1] // columns, columns)
    largest = torch.finfo(dtype).max
    scale = _scale(blocks.abs().amax((1, 3)), largest, recipe, most=torch.finfo(values.dtype).max)
    if recipe != "tensorwise":
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:m, :k]
    return (wide * scale).clamp(-largest, largest).to(dtype), 1.0 / scale


def through_fp8(values: Tensor, recipe: str, *, weight: bool = False, dtype: torch.dtype = E4M3) -> Tensor:
    """Return values [..., k] as the product sees them, in their own dtype."""
    quantized, inverse = quantize(values.reshape(-1, values.shape[-1]), recipe, weight=weight, dtype=dtype)
    return (quantized.float() * inverse).view(values.shape).to(values.dtype)


def _scale(amax: Tensor, largest: float, recipe: str, *, most: float) -> Tensor:
    """Return the factor of each block; 1 where it has zeros only, ``most`` where it would be infinite."""
    if recipe == "mxfp8":
        # The exponent of amax / largest, rounded up: nothing saturates. E8M0 ends at 2^-127.
        mantissa, exponent = torch.frexp(amax * (1.0 / largest))
        exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-127)
        scale = torch.ldexp(torch.ones_like(amax), -exponent)
    else:
        # A tensor divided by a tensor is rounded once; a number divided by a tensor twice.
        scale = torch.div(torch.full_like(amax, largest), amax)
        scale = scale.clamp(max=most)
        if recipe == "blockwise":
            scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)
