"""Matrix products in float32 on a CPU that is not Intel's, by oneDNN.

torch takes MKL for them, which uses vectors of 256 bits on processors of AMD, also where they have 512.
oneDNN, which is in torch as well, takes half the time (``python benchmarks/cpu_products.py``). Neither is
exact: their sums differ in order.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FEWEST_PRODUCTS = 2**24
"""Of numbers, from which on oneDNN is asked: its first call of a shape takes a millisecond."""
_PIECE_BYTES = 16 * 2**20
"""Of a result that is added to another tensor: it is held beside that."""
_LARGEST, _SMALLEST, _STEP = 1024, 64, 16
"""Blocks of tokens: powers of two between the first two, and multiples of the last. oneDNN holds a megabyte
or two for every shape that it has met, and packs differ in length."""
_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def onednn_is_faster() -> bool:
    """True on processors of AMD that have vectors of 512 bits."""
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "AuthenticAMD" in vendor and torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def install_products() -> None:
    """Have torch ask oneDNN from now on, in this process. Calling it again does nothing."""
    for name, product in (("mm", _mm), ("addmm.out", _addmm_out)):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():  # of what allow_override says
            warnings.simplefilter("ignore")
            product = functools.partial(product, kernel)
            _library.impl(  # type: ignore[no-untyped-call]
                name, product, "CPU", with_keyset=True, allow_override=True
            )


def _mm(torchs: Any, keys: Any, left: Tensor, right: Tensor) -> Tensor:
    if not _is_large(left, right):
        small: Tensor = torchs.call_boxed(keys, left, right)
        return small
    return _product(left, right)


def _addmm_out(
    torchs: Any,
    keys: Any,
    added: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    out: Tensor,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor:
    """out = beta · added + alpha · left @ right"""
    if added is not out or beta not in (0, 1) or out.dtype != left.dtype or not _is_large(left, right):
        torchs.call_boxed(keys, added, left, right, beta=beta, alpha=alpha, out=out)
        return out
    # Pieces of the longer side.
    rows, columns = out.shape
    pieces = -(-out.nbytes // _PIECE_BYTES)
    if rows >= columns:
        cut = [(o, x, right) for o, x in zip(out.chunk(pieces), left.chunk(pieces), strict=True)]
    else:
        cut = [(o, left, x) for o, x in zip(out.chunk(pieces, 1), right.chunk(pieces, 1), strict=True)]
    for piece, a, b in cut:
        if beta:
            piece.add_(_product(a, b), alpha=alpha)
        else:
            torch.mul(_product(a, b), alpha, out=piece)
    return out


def _is_large(left: Tensor, right: Tensor) -> bool:
    return left.dtype is torch.float32 and left.numel() * right.shape[1] >= _FEWEST_PRODUCTS


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in blocks of tokens: these are the rows or, in the gradient of a weight, where left is
    transposed, what the sums are over."""
    if left.stride(0) == 1:
        sizes = _blocks(left.shape[1])
        pieces = zip(torch.split(left, sizes, 1), torch.split(right, sizes), strict=True)
        return functools.reduce(Tensor.add_, (_block(x, y) for x, y in pieces))
    parts = [_block(x, right) for x in torch.split(left, _blocks(len(left)))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks(count: int) -> list[int]:
    """Powers of two, from large to small, and what is left."""
    sizes, size = list[int](), _LARGEST
    while size >= _SMALLEST:
        sizes += [size] * (count // size)
        count, size = count % size, size // 2
    return [*sizes, count] if count else sizes


def _block(left: Tensor, right: Tensor) -> Tensor:
    """The product of a block, with zeros up to the next multiple."""
    rows, inner = left.shape
    if left.stride(0) == 1:
        if missing := -inner % _STEP:
            left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
    elif missing := -rows % _STEP:
        left = F.pad(left, (0, 0, 0, missing))
    if not (right.is_contiguous() or right.t().is_contiguous()):
        # Columns of a wider tensor, as adapters of gate and up have them: oneDNN has slow code for these.
        right = right.contiguous()
    out: Tensor = _linear(left, right.t(), None, "none", [], "")
    return out[:rows]


_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
