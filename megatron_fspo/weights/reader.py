"""The interface of a checkpoint on disk: tensors by their Hugging Face names, read whole or in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_fspo.errors import InputError

Slices = tuple[slice, ...]
BLOCK_BYTES = 256 * 2**20


class Reader(Protocol):
    """A checkpoint folder. Opening it reads names, shapes and dtypes; ``read`` loads only what it returns."""

    folder: Path

    def names(self) -> set[str]: ...

    def file(self, name: str) -> Path:
        """Return the file that contains a tensor; the first, if there are several."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that ``read`` returns. Raises ``InputError`` unless it is a plain float."""
        ...

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Read a tensor, or the given slices of it, to the CPU. The result must not be modified."""
        ...


def size_in_bytes(reader: Reader, names: Iterable[str] | None = None) -> int:
    """Return the bytes of the given tensors as read; default: of all."""
    names = reader.names() if names is None else names
    return sum(torch.Size(reader.shape(name)).numel() * reader.dtype(name).itemsize for name in names)


def row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Yield ranges of rows (dimension 0) of at most 256 MiB, or of one row if that is larger."""
    row_bytes = itemsize * torch.Size(shape[1:]).numel()
    step = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


def stream(
    reader: Reader, names: Iterable[str], progress: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors as (name, block of consecutive rows); ``progress`` is called with each block's bytes."""
    for name in names:
        for rows in row_blocks(reader.shape(name), reader.dtype(name).itemsize):
            block = read_rows(reader, name, rows)
            yield name, block
            progress(block.nbytes)


def check_finite(values: Tensor, name: str) -> None:
    """Raise ``InputError`` if a value is not finite; faster than ``isfinite().all()`` for 16-bit floats."""
    if values.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(values)):
        raise InputError(f"{name} is not finite in {dtype_name(values.dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in ``config.json``, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def read_rows(reader: Reader, name: str, rows: slice) -> Tensor:
    """Read some rows of a tensor."""
    return reader.read(name, (rows, *(slice(0, size) for size in reader.shape(name)[1:])))
