"""Checksums of tensors that can be added over shards and compared up to rounding.

They consist of the sum and the sum of squares in float64. A hash of the bytes would not work, as vLLM fuses,
shards, pads and converts tensors, and on a CPU keeps only packed copies of some.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PACKED = " (packed)"
"""Suffix of a tensor's name for the packed copy that vLLM computes with on a CPU."""

# Elements converted to float64 at a time: as many as fit a core's cache, and 32 MiB on a GPU.
_CHUNK, _GPU_CHUNK = 2**16, 2**22


@dataclass(frozen=True)
class Checksum:
    """Sums over all elements, in float64; NaN if an element is NaN."""

    dtype: str
    """Dtype of the tensor, such as ``bfloat16``."""
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
        return Checksum(
            self.dtype if self.dtype == other.dtype else f"{self.dtype}/{other.dtype}",
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
        )

    def to_words(self) -> list[str]:
        """Return the fields as text, exactly, since JSON has no NaN."""
        return [self.dtype, str(self.count), repr(self.total), repr(self.squares)]

    @classmethod
    def from_words(cls, words: list[str]) -> Checksum:
        """Parse :meth:`to_words`. Raises ValueError or TypeError for anything else."""
        dtype, count, total, squares = words
        return cls(dtype, int(count), float(total), float(squares))


def checksum(tensor: Tensor) -> Checksum:
    """Return the checksum of a tensor of any shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel():
        return Checksum(dtype, 0, 0.0, 0.0)
    chunks = torch.split(tensor.detach().reshape(-1), _GPU_CHUNK if tensor.is_cuda else _CHUNK)
    rows = (values.to(torch.float64) for values in chunks)
    total, squares = torch.stack([torch.stack([row.sum(), row.dot(row)]) for row in rows]).sum(0).tolist()
    return Checksum(dtype, tensor.numel(), total, squares)
