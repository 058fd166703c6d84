"""The files of a ``torch_dist`` folder: chunks of global tensors, and the index of their locations.

Each rank writes its own files (``__<rank>_<n>.distcp``) and a partial index. One rank merges the indexes and
writes the result last; without it the folder cannot be loaded. A *box* is a region of a tensor: offsets and
sizes, one of each per dimension.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fspo.errors import InputError
from megatron_fspo.weights.safe_pickle import COMMON, METADATA, check_files, load_entry, read_metadata

_FILE_BYTES = 4 * 2**30
_FORMAT = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


def boxes(shape: Sequence[int], first: int, end: int, *, limit: int) -> Iterator[Box]:
    """Cut positions [first, end) of a row-major tensor into consecutive boxes of at most ``limit`` values."""
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
    """Reads boxes into tensors, with one chunk in memory at a time.

    ``tensors`` has the dtype and shape of each global tensor by key. Raises ``InputError`` if the folder is
    not a checkpoint, or is damaged or unsafe.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = read_metadata(folder)
        check_files(folder, self._metadata)
        stored = self._metadata.state_dict_metadata.items()
        self._stored = {key: item for key, item in stored if isinstance(item, TensorStorageMetadata)}
        self.tensors = {key: (item.properties.dtype, tuple(item.size)) for key, item in self._stored.items()}
        self._chunks: dict[str, list[Box]] = {}
        # Kept because the next box is often in the same chunk.
        self._loaded: tuple[str, Box, Tensor] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def shape(self, key: str) -> tuple[int, ...]:
        if key not in self.tensors:
            raise InputError(f"{self.folder / METADATA} has no tensor {key}")
        return self.tensors[key][1]

    def chunks(self, key: str) -> list[Box]:
        """Return the boxes into which a tensor was cut."""
        if key not in self._chunks:
            whole = self.shape(key)
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._stored[key].chunks]
            for offsets, sizes in chunks:
                inside = [0 <= o < o + s <= n for o, s, n in zip(offsets, sizes, whole, strict=False)]
                if not len(offsets) == len(sizes) == len(whole) or not all(inside):
                    odd = f"an invalid chunk of shape {sizes} at {offsets}"
                    raise InputError(f"{self.folder / METADATA}: {key} of shape {whole} has {odd}")
            self._chunks[key] = chunks
        return self._chunks[key]

    def file(self, key: str, chunk: Box) -> Path:
        return self.folder / str(self._info(key, chunk).relative_path)

    def read_into(
        self, key: str, wanted: Sequence[tuple[Box, Tensor]], among: Iterable[Box] | None = None
    ) -> None:
        """Fill each tensor in ``wanted`` with the values of its box, cast to its dtype; 0 outside the stored
        tensor.

        ``among`` are the chunks that may overlap the boxes; default: all. Raises ``InputError`` if a value is
        missing or stored twice, or if a chunk does not match the index.
        """
        whole: Box = ((0,) * len(self.shape(key)), self.shape(key))
        inside = [_intersection(box, whole) for box, _ in wanted]
        for part, (box, target) in zip(inside, wanted, strict=True):
            if part != box:
                target.zero_()
        filled: list[list[Box]] = [[] for _ in wanted]
        for chunk in self.chunks(key) if among is None else among:
            shared = [_intersection(chunk, box) for box, _ in wanted]
            if not any(shared):
                continue
            values = self._load(key, chunk)
            for overlap, (box, target), overlaps in zip(shared, wanted, filled, strict=True):
                if overlap is not None:
                    target[_slices(overlap, box[0])] = values[_slices(overlap, chunk[0])].to(target.device)
                    overlaps.append(overlap)
        for part, (box, _), overlaps in zip(inside, wanted, filled, strict=True):
            self._check_cover(key, box, math.prod(part[1]) if part else 0, overlaps)

    def _check_cover(self, key: str, box: Box, size: int, overlaps: list[Box]) -> None:
        filled = sum(math.prod(sizes) for _, sizes in overlaps)
        twice = any(_intersection(a, b) for a, b in itertools.combinations(overlaps, 2))
        if filled != size or twice:  # an overlap could hide a gap
            problem = "chunks overlap in" if twice else f"chunks cover {filled} of {size} values of"
            raise InputError(f"{self.folder / METADATA}: {problem} {key} at {box[0]}")

    def _info(self, key: str, chunk: Box) -> Any:
        info = self._metadata.storage_data.get(MetadataIndex(key, torch.Size(chunk[0])))
        if info is None:
            raise InputError(f"{self.folder / METADATA}: no file is listed for {key} at {chunk[0]}")
        return info

    def _load(self, key: str, chunk: Box) -> Tensor:
        if self._loaded is None or self._loaded[:2] != (key, chunk):
            self._loaded = None  # free it before the next is loaded
            info = self._info(key, chunk)
            values, dtype = load_entry(self.folder, info), self.tensors[key][0]
            if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != (chunk[1], dtype):
                raise InputError(f"{self.folder / info.relative_path}: {key} differs from the index")
            self._loaded = key, chunk, values
        return self._loaded[2]


def _intersection(a: Box, b: Box) -> Box | None:
    """Return the common box of two boxes; None if it is empty or their dimensions differ in number."""
    if len(a[0]) != len(b[0]):
        return None
    first = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    sizes = tuple(end - at for at, end in zip(first, ends, strict=True))
    return (first, sizes) if all(size > 0 for size in sizes) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of a box in a tensor whose first value is at ``origin``."""
    return tuple(slice(at - o, at - o + size) for at, size, o in zip(*box, origin, strict=True))


class ChunkWriter:
    """Appends entries to this rank's files.

    ``index`` has the location of everything written, and ``sums`` the SHA-256 of each closed file by name.
    """

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self.index = Metadata(state_dict_metadata={}, storage_data={})
        self._folder = folder
        self._rank = rank
        self.sums: dict[str, str] = {}
        self._stream: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._files = 0

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def declare(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Declare a global tensor before its first chunk; no effect if it is already declared."""
        stored = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        self.index.state_dict_metadata.setdefault(key, stored)

    def add(self, key: str, offsets: tuple[int, ...], values: Tensor) -> None:
        """Write a chunk from any device; missing leading dimensions of ``values`` have size 1."""
        stored = self.index.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = torch.Size([1] * (len(offsets) - values.dim()) + list(values.shape))
        # Copied, because torch.save would write all of a view's storage.
        chunk = torch.empty(sizes, dtype=stored.properties.dtype).copy_(values.view(sizes))
        stored.chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=sizes))
        self._append(MetadataIndex(key, torch.Size(offsets)), chunk)

    def add_object(self, key: str, value: Any) -> None:
        self.index.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), value)

    def _append(self, index: MetadataIndex, value: Any) -> None:
        if self._stream is None or self._stream.tell() > _FILE_BYTES:
            self.close()
            name = f"__{self._rank}_{self._files}.distcp"
            self._stream, self._hash = open(self._folder / name, "wb"), hashlib.sha256()
            self._files += 1
        stream, first = self._stream, self._stream.tell()
        _save(value, stream, self._hash)
        info = _StorageInfo(Path(stream.name).name, first, stream.tell() - first)
        self.index.storage_data[index] = info

    def close(self) -> None:
        """Close the current file after its entries are on the disk (fsync)."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self.sums[Path(self._stream.name).name] = self._hash.hexdigest()


def merge_indexes(indexes: Iterable[Metadata]) -> Metadata:
    """Merge the indexes of several ranks, which must agree on each tensor's shape and dtype."""
    merged = Metadata(state_dict_metadata={}, storage_data={})
    for index in indexes:
        merged.storage_data.update(index.storage_data)
        for key, stored in index.state_dict_metadata.items():
            known = merged.state_dict_metadata.setdefault(key, stored)
            if known is stored:
                continue
            assert isinstance(known, TensorStorageMetadata) and isinstance(stored, TensorStorageMetadata)
            assert (known.size, known.properties) == (stored.size, stored.properties), key
            known.chunks.extend(stored.chunks)
    return merged


def write_index(folder: Path, index: Metadata) -> list[Path]:
    """Write the index and Megatron's metadata, which make the folder a checkpoint; return the files."""
    common, kind, metadata = (folder / name for name in (COMMON, "metadata.json", METADATA))
    with open(common, "wb") as stream:
        _save({}, stream)
    kind.write_text(json.dumps(_FORMAT), encoding="utf-8")
    metadata.write_bytes(pickle.dumps(index))
    return [common, kind, metadata]


def _save(value: Any, stream: BinaryIO, hashed: hashlib._Hash | None = None) -> None:
    """Save by way of memory, because torch replaces the error of a full disk by its own."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    # Released explicitly: Python 3.12.1 crashes when it collects such a view with a traceback.
    with buffer.getbuffer() as view:
        stream.write(view)
        if hashed is not None:
            hashed.update(view)
