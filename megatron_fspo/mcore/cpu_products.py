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
from torch import Tensor

_FEWEST_PRODUCTS = 2**24
"""Of numbers, from which on oneDNN is asked: its first call of a shape takes a millisecond."""
_PIECE_BYTES = 16 * 2**20
"""Of a result that is added to another tensor: it is held beside that."""
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


_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default


def _product(left: Tensor, right: Tensor) -> Tensor:
    return _linear(left, right.t(), None, "none", [], "")
