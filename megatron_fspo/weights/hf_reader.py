"""Read Hugging Face checkpoints: safetensors in floats or FP8 with block scales, never pickles."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.hf_config import read_architecture
from megatron_fspo.weights.reader import BLOCK_BYTES, Slices

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class _Entry:
    path: Path
    shape: tuple[int, ...]
    dtype: str
    """The name in safetensors, such as ``BF16``."""
    stacked: tuple[str, int, int] | None = None
    """Of an expert's matrix in a tensor of all: that's name, the expert, and the first row."""


class HFReader:
    """The tensors of a Hugging Face checkpoint folder; a :class:`Reader`.

    FP8 weights (DeepSeek's format, which Qwen3 uses too) are read in the config's dtype: each value times the
    scale of its ``weight_block_size`` block in ``*_scale_inv``. Experts that are stacked in one tensor of a
    layer (Qwen3.5) are read one by one, under the names that other families' files have.

    Raises:
        InputError: files or index are inconsistent or damaged.
    """

    def __init__(self, checkpoint_dir: str | Path) -> None:
        self.folder = Path(checkpoint_dir)
        self._entries: dict[str, _Entry] = {}
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file() and single.is_file():
            raise InputError(f"{self.folder} has both {SINGLE} and {INDEX}: remove the stale one")
        if not index.is_file() and not single.is_file():
            raise InputError(f"{self.folder} has neither {SINGLE} nor {INDEX}")
        weight_map = _read_index(index) if index.is_file() else {}
        for path in sorted({self.folder / file for file in weight_map.values()}) or [single]:
            self._list(path)
        for name, file in weight_map.items():
            if name not in self._entries or self._entries[name].path != self.folder / file:
                raise InputError(f"{index}: {file} does not contain {name}")
        if unlisted := self._entries.keys() - weight_map.keys() if weight_map else ():
            raise InputError(f"{index} does not list {min(unlisted)} in {self.file(min(unlisted))}")
        self._entries = dict(self._unstacked())
        self._scales = self._pair_scales()
        self._opened: Path | None = None
        self._mapped = 0

    def _list(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"{path} is missing; {INDEX} lists it")
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():
                    if name in self._entries:
                        raise InputError(f"{name} is in both {self.file(name)} and {path}")
                    tensor = handle.get_slice(name)
                    self._entries[name] = _Entry(path, tuple(tensor.get_shape()), tensor.get_dtype())
        except SafetensorError as error:
            raise InputError(f"{path} is truncated or not a safetensors file: {error}") from error

    def _unstacked(self) -> Iterator[tuple[str, _Entry]]:
        """Yield the tensors, and the matrices of stacked experts in their place."""
        for name, entry in self._entries.items():
            match = _STACKED.fullmatch(name)
            if match is None or len(entry.shape) != 3 or f"{name}_bias" in self._entries:
                yield name, entry
                continue
            parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            count, rows, columns = entry.shape
            rows //= len(parts)
            for expert in range(count):
                for number, part in enumerate(parts):
                    one = replace(entry, shape=(rows, columns), stacked=(name, expert, number * rows))
                    yield f"{match[1]}.{expert}.{part}.weight", one

    def _pair_scales(self) -> dict[str, _Entry]:
        """Remove the scales of FP8 weights from the entries, and return them by the weight's name."""
        names = {name for name in self._entries if name.endswith(_SCALE)}
        scales = {name.removesuffix(_SCALE): self._entries.pop(name) for name in names}
        quantised = {name for name, entry in self._entries.items() if entry.dtype == _FP8}
        if not scales and not quantised:
            return {}
        arch = read_architecture(self.folder)
        if (block := arch.fp8_block) is None:
            raise InputError(f"{self.folder} has FP8 weights but no quantization_config")
        self._block, self._dequantised = block, arch.dtype
        if lonely := quantised ^ scales.keys():
            name = min(lonely)
            lacks = f"no {name}{_SCALE}" if name in quantised else "a scale, but is not FP8"
            raise InputError(f"{(self._entries | scales)[name].path}: {name} has {lacks}")
        for name, scale in scales.items():
            shape = self._entries[name].shape
            blocks = tuple(math.ceil(size / of) for size, of in zip(shape, block, strict=False))
            if len(shape) != 2 or scale.shape != blocks or scale.dtype not in _DTYPES:
                got = f"{name}{_SCALE} is {scale.dtype} {scale.shape}"
                raise InputError(f"{scale.path}: {got}; blocks of {block} need floats of shape {blocks}")
        return scales

    def names(self) -> set[str]:
        return set(self._entries)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise InputError(f"{self.folder} has no tensor {name}")
        return self._entries[name]

    def file(self, name: str) -> Path:
        return self._entry(name).path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the file, or in the config for FP8; raises ``InputError`` unless a plain float."""
        dtype = self._entry(name).dtype
        if dtype == _FP8:
            return self._dequantised
        if dtype not in _DTYPES:
            raise InputError(f"{name} in {self.file(name)} is {dtype}; supported: {', '.join(_DTYPES)}")
        return _DTYPES[dtype]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        entry = self._entry(name)
        values = self._read(entry, name, slices)
        if entry.dtype != _FP8:
            return values
        selected = [part.indices(size) for part, size in zip(slices or (), entry.shape, strict=False)]
        ranges = selected or [(0, size, 1) for size in entry.shape]
        rows, columns = (
            torch.arange(first, end) // of for (first, end, _), of in zip(ranges, self._block, strict=True)
        )
        scale = self._read(self._scales[name], f"{name}{_SCALE}", None).float()
        return (values.float() * scale[rows][:, columns]).to(self._dequantised)

    def _read(self, entry: _Entry, name: str, slices: Slices | None) -> Tensor:
        # Opening reads the header, a millisecond per thousand tensors; what is read stays mapped until then.
        if self._opened != entry.path or self._mapped > BLOCK_BYTES:
            self._handle: Any = safe_open(entry.path, framework="pt")
            self._opened, self._mapped = entry.path, 0
        at: Any = ... if slices is None else slices
        if entry.stacked is not None:
            name, expert, first = entry.stacked
            rows, columns = slices or (slice(None), slice(None))
            start, stop, _ = rows.indices(entry.shape[0])
            at = (expert, slice(first + start, first + stop), columns)
        tensor: Tensor = self._handle.get_slice(name)[at]
        self._mapped += tensor.nbytes
        return tensor


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not an index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: weight_map must be an object with at least one tensor")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{path}: {file!r} must name a file in the same folder")
    return weight_map
