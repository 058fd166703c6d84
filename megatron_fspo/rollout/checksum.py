"""A checksum of a tensor that adds up over its shards and pieces, wherever they are, and bears rounding.

The sum and the sum of squares in float64. A hash of the bytes would not do: vLLM holds a tensor fused with
others, cut into the shards of its workers, padded, in another type, or on a CPU as a packed copy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PACKED = " (packed)"
"""After the name of a tensor: the copy of it that vLLM computes with on a CPU."""

# Elements in float64 at a time: what fits a core's cache, and on a GPU 32 MiB beside a model that fills it.
_CHUNK, _GPU_CHUNK = 2**16, 2**22


@dataclass(frozen=True)
class Checksum:
    """Sums over all elements, in float64; NaN where an element is."""

    dtype: str
    """The tensor's, as ``bfloat16``."""
    count: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def __add__(self, other: Checksum) -> Checksum:
        """The checksum of both together."""
        return Checksum(
            self.dtype if self.dtype == other.dtype else f"{self.dtype}/{other.dtype}",
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
        )

    def to_words(self) -> list[str]:
        """Write it as text, exactly: JSON knows no NaN."""
        return [self.dtype, str(self.count), repr(self.total), repr(self.squares)]

    @classmethod
    def from_words(cls, words: list[str]) -> Checksum:
        """Read :meth:`to_words`; ValueError or TypeError for anything else."""
        dtype, count, total, squares = words
        return cls(dtype, int(count), float(total), float(squares))


def checksum(tensor: Tensor) -> Checksum:
    """The checksum of a tensor of any shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel():
        return Checksum(dtype, 0, 0.0, 0.0)
    chunks = torch.split(tensor.detach().reshape(-1), _GPU_CHUNK if tensor.is_cuda else _CHUNK)
    rows = (values.to(torch.float64) for values in chunks)
    total, squares = torch.stack([torch.stack([row.sum(), row.dot(row)]) for row in rows]).sum(0).tolist()
    return Checksum(dtype, tensor.numel(), total, squares)
