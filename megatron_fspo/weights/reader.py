"""The interface of every checkpoint on disk: tensors by their Hugging Face names, read part by part."""

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
    """A checkpoint folder. Opening reads names, shapes and dtypes; ``read`` the asked part and no more."""

    folder: Path

    def names(self) -> set[str]: ...

    def file(self, name: str) -> Path:
        """The file that holds a tensor, or its first part."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype ``read`` gives; ``InputError`` unless it is a plain float."""
        ...

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor, or the part ``slices`` selects, on the CPU. Not to be written to."""
        ...


def size_in_bytes(reader: Reader, names: Iterable[str] | None = None) -> int:
    """Bytes of some tensors, or of all, as they are read."""
    names = reader.names() if names is None else names
    return sum(torch.Size(reader.shape(name)).numel() * reader.dtype(name).itemsize for name in names)


def row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Runs of rows (dimension 0) of at most 256 MiB, or one row."""
    row_bytes = itemsize * torch.Size(shape[1:]).numel()
    step = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


def stream(
    reader: Reader, names: Iterable[str], progress: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors as consecutive blocks of rows, each with the tensor's name; ``progress`` gets their bytes."""
    for name in names:
        for rows in row_blocks(reader.shape(name), reader.dtype(name).itemsize):
            block = read_rows(reader, name, rows)
            yield name, block
            progress(block.nbytes)


def check_finite(values: Tensor, name: str) -> None:
    """Raise ``InputError`` unless all are; many times faster than ``isfinite().all()`` for 16-bit floats."""
    if values.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(values)):
        raise InputError(f"{name} is not finite in {dtype_name(values.dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    """As ``config.json`` has it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def read_rows(reader: Reader, name: str, rows: slice) -> Tensor:
    """Read some rows of a tensor."""
    return reader.read(name, (rows, *(slice(0, size) for size in reader.shape(name)[1:])))
