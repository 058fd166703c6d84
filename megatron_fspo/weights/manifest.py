"""``manifest.json``, which records a checkpoint's origin and tensors, and bitwise comparison of checkpoints.

Tensors have their Hugging Face names in every format, so manifests can be compared. A hash is the SHA-256 of
a tensor's values in row-major order and its own dtype, as in a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.reader import Reader, dtype_name, read_rows, row_blocks
from megatron_fspo.weights.table import expected_hf_shapes

FILE = "manifest.json"
_DTYPES = {"float64", "float32", "bfloat16", "float16"}
_PACKAGES = ("megatron-core", "torch", "safetensors")


@dataclass(frozen=True)
class TensorRecord:
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    format: str
    """``huggingface`` or ``torch_dist``."""
    source: str
    """The checkpoint folder from which this one was made."""
    architecture: str
    versions: Mapping[str, str]
    layout: Mapping[str, int]
    """Parallel sizes of the exported model; empty for a conversion of files."""
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
        from megatron_fspo import __version__

        versions = {"megatron-fspo": __version__} | {name: metadata.version(name) for name in _PACKAGES}
        return cls(format, str(source), arch.model_type, versions, layout, tensors)

    def save(self, folder: Path) -> None:
        tensors = {
            name: {**vars(record), "dtype": dtype_name(record.dtype)} for name, record in self.tensors.items()
        }
        content = {**vars(self), "tensors": tensors}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Read ``manifest.json``; None if there is none. Raises ``InputError`` if it is damaged."""
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
    if dtype not in _DTYPES:  # readers use it
        raise ValueError(f"unsupported dtype {dtype!r}")
    return TensorRecord(tuple(shape), getattr(torch, dtype), sha256)


def check_record(name: str, record: TensorRecord, recorded: Mapping[str, TensorRecord]) -> None:
    """Raise ``InputError`` if a tensor has the dtype of its record but differs from it."""
    before = recorded.get(name)
    if before is not None and before.dtype == record.dtype and before != record:
        raise InputError(f"{name} differs from {FILE}: the checkpoint was damaged or changed")


def hashed_blocks(reader: Reader, name: str, records: dict[str, TensorRecord]) -> Iterator[Tensor]:
    """Yield consecutive rows of a tensor; after the last block its record is in ``records``."""
    shape, dtype, digest = reader.shape(name), reader.dtype(name), sha256()
    for rows in row_blocks(shape, dtype.itemsize):
        block = read_rows(reader, name, rows).contiguous()
        digest.update(block.view(torch.uint8).numpy().data)
        yield block
    records[name] = TensorRecord(shape, dtype, digest.hexdigest())


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints, or from its manifest."""

    name: str
    what: str
    values: int = 0
    """Number of values that differ in at least one bit."""
    largest: float = 0.0
    """Largest absolute difference."""


def compare(
    first: Reader, second: Reader, arch: Architecture, progress: Callable[[int], object] = lambda _: None
) -> Iterator[Difference]:
    """Yield the tensors of ``arch`` that differ; each checkpoint is read once, block by block."""
    for name in expected_hf_shapes(arch):
        absent = [reader for reader in (first, second) if name not in reader.names()]
        kinds = [
            (reader.shape(name), reader.dtype(name)) for reader in (first, second) if reader not in absent
        ]
        if absent:
            yield Difference(name, f"not in {absent[0].folder}")
        elif kinds[0] != kinds[1]:
            yield Difference(name, " and ".join(f"{dtype} {shape}" for shape, dtype in kinds))
        else:
            values, largest = 0, 0.0
            for rows in row_blocks(*kinds[0][:1], kinds[0][1].itemsize):
                block = read_rows(first, name, rows)
                count, worst = _differing(block, read_rows(second, name, rows))
                values, largest = values + count, max(largest, worst)
                progress(block.nbytes)
            if values:
                yield Difference(name, "values", values, largest)


def _differing(a: Tensor, b: Tensor) -> tuple[int, float]:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    a, b = a.contiguous(), b.contiguous()
    if torch.equal(a.view(bits), b.view(bits)):
        return 0, 0.0
    different = a.view(bits) != b.view(bits)
    gaps = (a[different].double() - b[different].double()).abs()
    # A NaN counts as an infinite difference; max() would depend on its position.
    return int(different.sum()), gaps.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def compare_with_manifest(
    reader: Reader, recorded: Mapping[str, TensorRecord], progress: Callable[[int], object] = lambda _: None
) -> Iterator[Difference]:
    """Yield the tensors that differ from the manifest."""
    records: dict[str, TensorRecord] = {}
    for name in sorted(recorded.keys() | reader.names()):
        if name not in reader.names():
            yield Difference(name, f"not in {reader.folder}")
        elif name not in recorded:
            yield Difference(name, "not in the manifest")
        else:
            for block in hashed_blocks(reader, name, records):
                progress(block.nbytes)
            if records[name] != recorded[name]:
                yield Difference(name, "differs from the manifest")
