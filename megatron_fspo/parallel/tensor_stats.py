"""Statistics of a tensor that add up over its shards and pieces, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

PACKED = " (packed)"
"""After the name of a tensor: the copy of it that vLLM computes with on a CPU."""

_CHUNK = 2**22  # elements in float64 at a time: 32 MiB beside a model that fills its device


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
    found = Stats(dtype=dtype, count=0, total=0.0, squares=0.0, low=math.inf, high=-math.inf)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        if not chunk.numel():
            continue
        values = chunk.to(torch.float64)
        low, high = values.aminmax()
        found += Stats(
            dtype=dtype,
            count=values.numel(),
            total=values.sum().item(),
            squares=values.square().sum().item(),
            low=low.item(),
            high=high.item(),
        )
    return found


def _unless_nan(value: float, *of: float) -> float:
    return math.nan if any(map(math.isnan, of)) else value
