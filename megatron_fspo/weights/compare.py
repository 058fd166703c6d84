"""Two checkpoints, tensor by tensor and bit by bit, whatever their formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.manifest import TensorRecord
from megatron_fspo.weights.reader import Reader, read_rows, row_blocks
from megatron_fspo.weights.table import expected_hf_shapes


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same."""

    name: str
    what: str
    values: int = 0
    """How many differ in at least one bit."""
    largest: float = 0.0
    """Largest absolute difference."""


def compare(
    first: Reader, second: Reader, arch: Architecture, progress: Callable[[int], object] = lambda _: None
) -> Iterator[Difference]:
    """The tensors of ``arch`` that differ, reading both checkpoints once, block by block."""
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
    # NaN is as far from a number as can be; max() would keep or lose it by chance.
    return int(different.sum()), gaps.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def compare_with_manifest(
    reader: Reader, recorded: dict[str, TensorRecord], progress: Callable[[int], object] = lambda _: None
) -> Iterator[Difference]:
    """The tensors that are no longer what the manifest beside them says."""
    for name in sorted(recorded.keys() | reader.names()):
        if name not in reader.names():
            yield Difference(name, f"not in {reader.folder}")
            continue
        if name not in recorded:
            yield Difference(name, "not in the manifest")
            continue
        digest, shape, dtype = sha256(), reader.shape(name), reader.dtype(name)
        for rows in row_blocks(shape, dtype.itemsize):
            block = read_rows(reader, name, rows).contiguous()
            digest.update(block.view(torch.uint8).numpy().data)
            progress(block.nbytes)
        if TensorRecord(shape, dtype, digest.hexdigest()) != recorded[name]:
            yield Difference(name, "not what the manifest says")
