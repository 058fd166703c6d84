"""``manifest.json`` beside a checkpoint: where it came from, and the shape, dtype and hash of every tensor.

Tensors go by their Hugging Face names whatever the format of the checkpoint, so manifests can be compared. A
hash is the SHA-256 of a tensor's values in row-major order and its dtype, as in a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture

FILE = "manifest.json"
_DTYPES = {"float64", "float32", "bfloat16", "float16"}
_PACKAGES = ("megatron-core", "torch", "safetensors")


@dataclass(frozen=True)
class TensorRecord:
    """What the manifest says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    format: str
    """``huggingface`` or ``torch_dist``."""
    source: str
    """The checkpoint folder this one was made from."""
    architecture: str
    versions: Mapping[str, str]
    layout: Mapping[str, int]
    """Parallel sizes of the model it was exported from; empty for a conversion of files."""
    tensors: Mapping[str, TensorRecord]

    @classmethod
    def new(
        cls,
        format: str,
        source: Path,
        arch: Architecture,
        layout: Mapping[str, int],
        tensors: Mapping[str, TensorRecord],
    ) -> Manifest:
        """With the versions of what runs here."""
        versions = {"megatron-fspo": _own_version()}
        for package in _PACKAGES:
            versions[package] = metadata.version(package)
        return cls(format, str(source), arch.model_type, versions, layout, tensors)

    def save(self, folder: Path) -> None:
        tensors = {
            name: {
                "shape": list(record.shape),
                "dtype": str(record.dtype).removeprefix("torch."),
                "sha256": record.sha256,
            }
            for name, record in self.tensors.items()
        }
        content = {**vars(self), "tensors": tensors}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is no manifest; ``InputError`` where it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        content["tensors"] = {name: _record(**record) for name, record in content["tensors"].items()}
        return Manifest(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a manifest: {error!r}") from error


def _record(shape: list[int], dtype: str, sha256: str) -> TensorRecord:
    if dtype not in _DTYPES:  # it decides what the tensor is read as
        raise ValueError(f"a tensor of dtype {dtype!r}")
    return TensorRecord(tuple(shape), getattr(torch, dtype), sha256)


def check_record(name: str, found: TensorRecord, recorded: Mapping[str, TensorRecord]) -> None:
    """``InputError`` if a tensor is no longer what the manifest says. In another dtype it may be."""
    before = recorded.get(name)
    if before is not None and before.dtype == found.dtype and before != found:
        raise InputError(f"{name} is not what the {FILE} beside it says: the file is damaged or was changed")


def _own_version() -> str:
    from megatron_fspo import __version__

    return __version__
