"""float32 matrix products by oneDNN on AMD CPUs.

torch uses MKL, which is limited to 256-bit vectors on AMD CPUs that have 512-bit ones. oneDNN, which is part
of torch, takes half the time (``python benchmarks/cpu_products.py``). Results differ by rounding only.
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
"""Fewest multiplications for which oneDNN is used: its first call with a shape takes a millisecond."""
_PIECE_BYTES = 16 * 2**20
"""Bytes of the pieces in which a product is added to another tensor; each piece needs a buffer."""
_LARGEST, _SMALLEST, _STEP = 1024, 64, 16
"""Token blocks are powers of two between the first two, and a remainder padded to a multiple of the last:
oneDNN keeps 1 to 2 MB per shape, and packs differ in length."""
_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def onednn_is_faster() -> bool:
    """Return True on AMD CPUs with AVX-512."""
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "AuthenticAMD" in vendor and torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def install_products() -> None:
    """Make torch use oneDNN for the rest of this process. A second call does nothing."""
    for name, product in (("mm", _mm), ("addmm.out", _addmm_out)):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():  # allow_override warns
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
    """Return out = beta · added + alpha · left @ right."""
    if added is not out or beta not in (0, 1) or out.dtype != left.dtype or not _is_large(left, right):
        torchs.call_boxed(keys, added, left, right, beta=beta, alpha=alpha, out=out)
        return out
    # Cut along the longer side.
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
    """Return left @ right in blocks of tokens. Tokens are the rows of left or, if left is transposed as in a
    weight gradient, the inner dimension."""
    if left.stride(0) == 1:
        sizes = _blocks(left.shape[1])
        pieces = zip(torch.split(left, sizes, 1), torch.split(right, sizes), strict=True)
        return functools.reduce(Tensor.add_, (_block(x, y) for x, y in pieces))
    parts = [_block(x, right) for x in torch.split(left, _blocks(len(left)))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks(count: int) -> list[int]:
    """Split ``count`` into powers of two, from large to small, and a remainder."""
    sizes, size = list[int](), _LARGEST
    while size >= _SMALLEST:
        sizes += [size] * (count // size)
        count, size = count % size, size // 2
    return [*sizes, count] if count else sizes


def _block(left: Tensor, right: Tensor) -> Tensor:
    """Multiply one block, padded with zeros to a multiple of ``_STEP``."""
    rows, inner = left.shape
    if left.stride(0) == 1:
        if missing := -inner % _STEP:
            left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
    elif missing := -rows % _STEP:
        left = F.pad(left, (0, 0, 0, missing))
    if not (right.is_contiguous() or right.t().is_contiguous()):
        # Column slices of a wider tensor, as for adapters of gate and up, are slow in oneDNN.
        right = right.contiguous()
    out: Tensor = _linear(left, right.t(), None, "none", [], "")
    return out[:rows]


_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
