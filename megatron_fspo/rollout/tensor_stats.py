"""Statistics of a tensor that add up over its shards and pieces, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

PACKED = " (packed)"
"""After the name of a tensor: the copy of it that vLLM computes with on a CPU."""

# Elements in float64 at a time: what fits a core's cache, and on a GPU 32 MiB beside a model that fills it.
_CHUNK, _GPU_CHUNK = 2**16, 2**22


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Of all elements, in float64. NaN where an element is."""

    dtype: str
    """Of the tensor, as ``bfloat16``."""
    count: int
    total: float
    squares: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def __add__(self, other: Stats) -> Stats:
        """Of both together."""
        return Stats(
            dtype=self.dtype if self.dtype == other.dtype else f"{self.dtype}/{other.dtype}",
            count=self.count + other.count,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            low=_unless_nan(min(self.low, other.low), self.low, other.low),
            high=_unless_nan(max(self.high, other.high), self.high, other.high),
        )

    def to_words(self) -> list[str]:
        """As text, exactly: JSON knows no NaN."""
        return [value if isinstance(value, str) else repr(value) for value in astuple(self)]

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Stats:
        """Of :meth:`to_words`; ValueError or TypeError for anything else."""
        dtype, count, total, squares, low, high = words
        return cls(
            dtype=dtype,
            count=int(count),
            total=float(total),
            squares=float(squares),
            low=float(low),
            high=float(high),
        )


def tensor_stats(tensor: Tensor) -> Stats:
    """Of a tensor of any shape; an empty one has low = ∞ and high = −∞."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel():
        return Stats(dtype=dtype, count=0, total=0.0, squares=0.0, low=math.inf, high=-math.inf)
    chunks = tensor.detach().reshape(-1).split(_GPU_CHUNK if tensor.is_cuda else _CHUNK)
    rows = (values.to(torch.float64) for values in chunks)
    table = torch.stack([torch.stack([row.sum(), row.dot(row), *row.aminmax()]) for row in rows]).cpu()
    total, squares = table[:, :2].sum(0).tolist()
    low, high = table[:, 2].min().item(), table[:, 3].max().item()
    return Stats(dtype=dtype, count=tensor.numel(), total=total, squares=squares, low=low, high=high)


def _unless_nan(value: float, *of: float) -> float:
    return math.nan if any(map(math.isnan, of)) else value
