"""Many tensors in one message: buckets of them, packed end to end.

A model of experts has tens of thousands of small tensors, and a collective for each would take longer than
their bytes. Needs torch only, as vLLM's workers use it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 16
"""Each tensor begins at a multiple of so many bytes, whatever its dtype."""

Shape = Sequence[int]


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Group named tensors into buckets of at most ``bucket_bytes`` (default ``BUCKET_BYTES``), or of one
    larger tensor. Holds at most one bucket and the next tensor."""
    limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of one or more tensors, uint8 [bytes] on ``device``. Without a copy for a single
    tensor that is there already and contiguous."""
    flat = [tensor.to(device).contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    packed = torch.empty(_end(map(len, flat)), dtype=torch.uint8, device=device)
    for start, piece in zip(_starts(map(len, flat)), flat, strict=False):
        packed[start : start + len(piece)] = piece
    return packed


def from_bytes(packed: Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Shape]) -> Iterator[Tensor]:
    """Yield the tensors of :func:`to_bytes`, as views of ``packed``."""
    sizes = _sizes(dtypes, shapes)
    for start, size, dtype, shape in zip(_starts(sizes), sizes, dtypes, shapes, strict=False):
        yield packed[start : start + size].view(dtype).view(tuple(shape))


def num_bytes(dtypes: Sequence[torch.dtype], shapes: Sequence[Shape]) -> int:
    """Return the length of what :func:`to_bytes` returns for tensors of these dtypes and shapes."""
    return _end(_sizes(dtypes, shapes))


def _sizes(dtypes: Sequence[torch.dtype], shapes: Sequence[Shape]) -> list[int]:
    return [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(dtypes, shapes, strict=True)]


def _starts(sizes: Iterable[int]) -> Iterator[int]:
    """Yield where each tensor begins, and where another one would."""
    return accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)


def _end(sizes: Iterable[int]) -> int:
    sizes = list(sizes)
    return list(_starts(sizes))[-2] + sizes[-1]
