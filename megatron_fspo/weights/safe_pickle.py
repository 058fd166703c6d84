"""Read the pickles of the ``torch_dist`` format through allow-lists, so that a checkpoint cannot run code.

``.metadata`` is a plain pickle, and ``torch.save`` writes the entries of ``.distcp`` files. ``common.pt``,
which torch and Megatron would unpickle without a check, is never read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_fspo.errors import InputError

METADATA = ".metadata"
COMMON = "common.pt"

_MODULES = {
    "torch": ["Size", "device", *(n for n, value in vars(torch).items() if isinstance(value, torch.dtype))],
    "torch.serialization": ["_get_layout"],
    "collections": ["OrderedDict"],
    "torch.distributed.checkpoint.metadata": [
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    ],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.planner": [
        *("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType", "BytesIOWriteData"),
    ],
    # torch before 2.9 stores the folder's path.
    "pathlib": ["PosixPath", "PurePosixPath"],
    "pathlib._local": ["PosixPath", "PurePosixPath"],
}
_ALLOWED = {(module, name) for module, names in _MODULES.items() for name in names}


class Unpickler(pickle.Unpickler):
    """Reads a pickle of ``allowed`` (module, name) only; raises nearly anything if it is damaged."""

    def __init__(self, data: bytes, allowed: Container[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not an allowed type")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a ``torch_dist`` folder; ``InputError`` if it is missing, damaged or unsafe."""
    path = folder / METADATA
    try:
        metadata = Unpickler(path.read_bytes(), _ALLOWED).load()
    except FileNotFoundError:
        raise InputError(f"{path} is missing; a Megatron checkpoint (torch_dist) must have it") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise _distrust(path, error) from error
    if not isinstance(metadata, Metadata) or not _is_index(metadata):
        raise InputError(f"{path} is not the index of a checkpoint")
    return metadata


def _is_index(metadata: Metadata) -> bool:
    """Return True if all fields have their declared types; a pickle may contain anything."""
    try:
        stored = metadata.state_dict_metadata
        tensors = [item for item in stored.values() if isinstance(item, TensorStorageMetadata)]
        chunks = [chunk for item in tensors for chunk in item.chunks]
        infos = metadata.storage_data.values()
        return (
            all(isinstance(key, str) for key in stored)
            and all(isinstance(item.size, tuple) for item in tensors)
            and all(isinstance(item.properties.dtype, torch.dtype) for item in tensors)
            and all(isinstance(size, tuple) for chunk in chunks for size in (chunk.offsets, chunk.sizes))
            and all(isinstance(chunk, ChunkStorageMetadata) for chunk in chunks)
            and all(isinstance(where, MetadataIndex) for where in metadata.storage_data)
            and all(type(info.relative_path) is str for info in infos)
            and all(type(number) is int for info in infos for number in (info.offset, info.length))
            and all(min(info.offset, info.length) >= 0 for info in infos)
        )
    except (AttributeError, TypeError):
        return False


def _distrust(path: Path, error: Exception) -> InputError:
    """Return an ``InputError`` with the first line of torch's message, which may be long."""
    (first, *_) = str(error).splitlines() or [type(error).__name__]
    return InputError(f"{path} is damaged or unsafe: {first}")


def load_entry(folder: Path, info: Any) -> Any:
    """Load one entry of a ``.distcp`` file: a tensor or a plain Python value."""
    path = folder / info.relative_path
    with open(path, "rb") as stream:
        entry: Any = _create_file_view(stream, info.offset, info.length)
        try:
            return torch.load(entry, map_location="cpu", weights_only=True)
        except Exception as error:
            raise _distrust(path, error) from error


def check_files(folder: Path, metadata: Metadata) -> None:
    """Raise ``InputError`` if a file is missing, truncated, compressed or outside the folder."""
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if Path(name).name != name:
            raise InputError(f"{folder / METADATA}: {name!r} must name a file in the same folder")
        path = folder / name
        if name not in sizes:
            if not path.is_file():
                raise InputError(f"{path} is missing; it contains {index.fqn}")
            sizes[name] = path.stat().st_size
        if info.offset + info.length > sizes[name]:
            raise InputError(f"{path} is truncated: {index.fqn} ends at byte {info.offset + info.length:,}")
        if getattr(info, "transform_descriptors", None):
            raise InputError(f"{path}: {index.fqn} is compressed, which is not supported")
