"""Parts of the global tensors of a ``torch_dist`` folder, whoever cut them into chunks and however.

A *box* is a part of a tensor: offsets and sizes, one of each per dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fspo.errors import InputError
from megatron_fspo.weights.safe_pickle import METADATA, check_files, load_entry, read_metadata

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


def boxes(shape: Sequence[int], first: int, end: int, *, limit: int) -> Iterator[Box]:
    """Cut the values ``first`` to ``end`` of a row-major tensor into boxes that lie one after the other.

    Args:
        shape: the tensor's.
        first, end: flat positions in it.
        limit: no box has more values.
    """
    if len(shape) == 1:
        for at in range(first, end, limit):
            yield (at,), (min(limit, end - at),)
        return
    row_size, at = math.prod(shape[1:]), first
    while at < end:
        row, column = divmod(at, row_size)
        whole_rows = min(end - at, limit) // row_size if column == 0 else 0
        if whole_rows:
            yield (row, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
            at += whole_rows * row_size
            continue
        stop = min(end, (row + 1) * row_size)
        for offsets, sizes in boxes(shape[1:], column, stop - row * row_size, limit=limit):
            yield (row, *offsets), (1, *sizes)
        at = stop


class ChunkReader:
    """Reads boxes into tensors, one chunk in memory at a time.

    Raises:
        InputError: the folder is no checkpoint, is damaged, or is not to be trusted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = read_metadata(folder)
        check_files(folder, self._metadata)

    def __contains__(self, key: str) -> bool:
        return isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a global tensor."""
        return tuple(self._stored(key).size)

    def _stored(self, key: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise InputError(f"{self.folder / METADATA} has no tensor {key}")
        return stored

    def read_into(self, key: str, wanted: Sequence[tuple[Box, Tensor]]) -> None:
        """Fill tensors with the values of their boxes, cast to their dtypes; what lies beyond the stored
        tensor is 0.

        Raises:
            InputError: a value is missing, stored twice, or not what the index says.
        """
        found: list[list[Box]] = [[] for _ in wanted]
        for chunk in self._stored(key).chunks:
            place = (tuple(chunk.offsets), tuple(chunk.sizes))
            shared = [_intersection(place, box) for box, _ in wanted]
            if not any(shared):
                continue
            values = self._load(key, place)
            for part, (box, target), boxes_of in zip(shared, wanted, found, strict=True):
                if part is not None:
                    target[_slices(part, box[0])] = values[_slices(part, place[0])].to(target.device)
                    boxes_of.append(part)
        whole: Box = ((0,) * len(self.shape(key)), self.shape(key))
        for (box, target), parts in zip(wanted, found, strict=True):
            inside = _intersection(box, whole)
            self._check_cover(key, inside, parts)
            if inside != box:
                _zero_outside(target, inside, box)

    def _check_cover(self, key: str, box: Box | None, parts: list[Box]) -> None:
        size, filled = math.prod(box[1]) if box else 0, sum(math.prod(sizes) for _, sizes in parts)
        overlapping = any(_intersection(a, b) for a, b in itertools.combinations(parts, 2))
        if filled != size or overlapping:  # what overlaps could make up for a hole
            problem = "chunks overlap in" if overlapping else f"chunks cover {filled} of {size} values of"
            raise InputError(f"{self.folder / METADATA}: {problem} {key}")

    def _load(self, key: str, place: Box) -> Tensor:
        offsets, sizes = place
        info = self._metadata.storage_data.get(MetadataIndex(key, torch.Size(offsets)))
        if info is None:
            raise InputError(f"{self.folder / METADATA}: no file for {key} at {offsets}")
        values = load_entry(self.folder, info)
        dtype = self._stored(key).properties.dtype
        if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != (sizes, dtype):
            raise InputError(f"{self.folder / info.relative_path}: {key} is not what the index says")
        return values


def _intersection(a: Box, b: Box) -> Box | None:
    """The box of what is in both; None if nothing is.  A chunk of another rank has nothing of any box."""
    if len(a[0]) != len(b[0]):
        return None
    first = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    sizes = tuple(end - at for at, end in zip(first, ends, strict=True))
    return (first, sizes) if all(size > 0 for size in sizes) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Where a box is in a tensor whose own first value is at ``origin``."""
    return tuple(slice(at - o, at - o + size) for at, size, o in zip(*box, origin, strict=True))


def _zero_outside(target: Tensor, inside: Box | None, box: Box) -> None:
    kept = None if inside is None else target[_slices(inside, box[0])].clone()
    target.zero_()
    if inside is not None and kept is not None:
        target[_slices(inside, box[0])] = kept
