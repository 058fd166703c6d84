"""The files of a ``torch_dist`` folder: chunks of global tensors, and the index that finds them.

Every rank that writes has files of its own (``__<rank>_<n>.distcp``) and a part of the index. One rank merges
the parts and writes the index last: without it nothing of the folder loads.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterable
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

from megatron_fspo.weights.safe_pickle import COMMON, METADATA

_FILE_BYTES = 4 * 2**30
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class ChunkWriter:
    """Appends entries to this rank's files.

    Attributes:
        index: what was written, and where.
        sums: name of each file that is closed → its SHA-256, in hexadecimal.
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
        """A global tensor, before its first chunk."""
        properties = TensorProperties(dtype=dtype)
        self.index.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(shape), [])

    def declared(self, key: str) -> bool:
        """Whether :meth:`declare` was called for it."""
        return key in self.index.state_dict_metadata

    def add(self, key: str, offsets: tuple[int, ...], values: Tensor) -> None:
        """A chunk, from any device; dimensions the values lack have size 1, in front."""
        stored = self.index.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = torch.Size([1] * (len(offsets) - values.dim()) + list(values.shape))
        # A copy: torch.save would write all of a view's storage.
        chunk = torch.empty(sizes, dtype=stored.properties.dtype).copy_(values.view(sizes))
        stored.chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=sizes))
        self._append(MetadataIndex(key, torch.Size(offsets)), chunk)

    def add_object(self, key: str, value: Any) -> None:
        """A Python value."""
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
        """All entries are on the disk, not on their way to it."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self.sums[Path(self._stream.name).name] = self._hash.hexdigest()


def merge_indexes(parts: Iterable[Metadata]) -> Metadata:
    """One index of what several ranks wrote; they agree on the shape and dtype of a tensor."""
    merged = Metadata(state_dict_metadata={}, storage_data={})
    for part in parts:
        merged.storage_data.update(part.storage_data)
        for key, stored in part.state_dict_metadata.items():
            known = merged.state_dict_metadata.setdefault(key, stored)
            if known is stored:
                continue
            assert isinstance(known, TensorStorageMetadata) and isinstance(stored, TensorStorageMetadata)
            assert (known.size, known.properties) == (stored.size, stored.properties), key
            known.chunks.extend(stored.chunks)
    return merged


def write_index(folder: Path, index: Metadata) -> list[Path]:
    """Make the folder a checkpoint, for Megatron too; returns the files."""
    common, kind, metadata = (folder / name for name in (COMMON, "metadata.json", METADATA))
    with open(common, "wb") as stream:
        _save({}, stream)
    kind.write_text(json.dumps(_FORMAT), encoding="utf-8")
    metadata.write_bytes(pickle.dumps(index))
    return [common, kind, metadata]


def _save(value: Any, stream: BinaryIO, hashed: hashlib._Hash | None = None) -> None:
    """By way of memory: torch turns a full disk into errors of its own."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    # Released here: Python 3.12.1 crashes when it collects such a view with an error's traceback.
    with buffer.getbuffer() as view:
        stream.write(view)
        if hashed is not None:
            hashed.update(view)
