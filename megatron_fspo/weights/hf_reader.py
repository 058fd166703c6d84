"""Read Hugging Face checkpoints: safetensors in floats, FP8 or MXFP4 with scales, never pickles."""

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
_MXFP4 = "MXFP4"
_FP4 = torch.tensor([sign * x for sign in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""Values of the 16 codes."""
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_GEMMA3 = {
    r"^model\.language_model\.": "language_model.model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
}
"""Names in files of the multimodal Gemma 3 → those that transformers writes: releases and trainers differ."""


@dataclass(frozen=True)
class _Entry:
    path: Path
    name: str
    """In the file."""
    shape: tuple[int, ...]
    dtype: str
    """The name in safetensors, such as ``BF16``."""
    stacked: tuple[int, int] | None = None
    """Of an expert's matrix in a tensor of all: the expert, and the first row."""


class HFReader:
    """The tensors of a Hugging Face checkpoint folder; a :class:`Reader`.

    FP8 weights (DeepSeek's format, which Qwen3 uses too) are read in the config's dtype: each value times the
    scale of its ``weight_block_size`` block in ``*_scale_inv``. So are experts in MXFP4 (gpt-oss):
    ``*_blocks`` has 32 values in 16 bytes, ``*_scales`` the exponent of their common factor. Experts that are
    stacked in one tensor of a layer (Qwen3.5) are read one by one, under the names that other families' files
    have, and Gemma 3's tensors under the names that transformers writes.

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
        if any("multi_modal_projector." in name for name in self._entries):
            self._rename()
        self._scales = self._pair_scales()
        self._packed = dict(self._pair_blocks())
        if self._packed:
            self._dequantised = read_architecture(self.folder).dtype
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
                    self._entries[name] = _Entry(path, name, tuple(tensor.get_shape()), tensor.get_dtype())
        except SafetensorError as error:
            raise InputError(f"{path} is truncated or not a safetensors file: {error}") from error

    def _rename(self) -> None:
        for old, entry in [*self._entries.items()]:
            new = old
            for pattern, name in _GEMMA3.items():
                new = re.sub(pattern, name, new)
            if new != old and new in self._entries:
                raise InputError(f"{entry.path}: {old} is another name of {new} in {self.file(new)}")
            self._entries[new] = self._entries.pop(old)

    def _unstacked(self) -> Iterator[tuple[str, _Entry]]:
        """Yield the tensors, and the matrices of stacked experts in their place."""
        for name, entry in self._entries.items():
            match = _STACKED.fullmatch(name)
            if match is None or len(entry.shape) != 3 or f"{name}_bias" in self._entries:
                yield name, entry
                continue
            parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            count, rows, columns = entry.shape
            if rows % len(parts):
                raise InputError(f"{entry.path}: {name} has {rows} rows, not as many of gate as of up")
            rows //= len(parts)
            for expert in range(count):
                for number, part in enumerate(parts):
                    one = replace(entry, shape=(rows, columns), stacked=(expert, number * rows))
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

    def _pair_blocks(self) -> Iterator[tuple[str, tuple[_Entry, _Entry]]]:
        """Replace MXFP4's blocks [E, out, in / 32, 16] and scales [E, out, in / 32] by the tensor
        [E, in, out]; yield them by its name."""
        for name in [key.removesuffix("_blocks") for key in self._entries if key.endswith("_blocks")]:
            blocks, scales = (self._entries.pop(f"{name}{end}", None) for end in ("_blocks", "_scales"))
            assert blocks is not None
            kinds = {entry.dtype for entry in (blocks, scales) if entry}
            if scales is None or kinds != {"U8"} or blocks.shape != (*scales.shape, 16):
                raise InputError(f"{blocks.path}: {name}_blocks has no {name}_scales that fit it")
            if len(scales.shape) != 3 or name in self._entries:
                raise InputError(f"{blocks.path}: {name}_blocks is not of three dimensions, or there twice")
            experts, rows, groups = scales.shape
            self._entries[name] = _Entry(blocks.path, name, (experts, 32 * groups, rows), _MXFP4)
            yield name, (blocks, scales)

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
        """The dtype in the file, or in the config for FP8 and MXFP4; raises ``InputError`` for others unless
        plain floats."""
        dtype = self._entry(name).dtype
        if dtype in (_FP8, _MXFP4):
            return self._dequantised
        if dtype not in _DTYPES:
            raise InputError(f"{name} in {self.file(name)} is {dtype}; supported: {', '.join(_DTYPES)}")
        return _DTYPES[dtype]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        entry = self._entry(name)
        if entry.dtype == _MXFP4:
            return self._unpacked(name, slices or (slice(None),) * 3)
        values = self._read(entry, slices)
        if entry.dtype != _FP8:
            return values
        selected = [part.indices(size) for part, size in zip(slices or (), entry.shape, strict=False)]
        ranges = selected or [(0, size, 1) for size in entry.shape]
        rows, columns = (
            torch.arange(first, end) // of for (first, end, _), of in zip(ranges, self._block, strict=True)
        )
        scale = self._read(self._scales[name]).float()
        return (values.float() * scale[rows][:, columns]).to(self._dequantised)

    def _unpacked(self, name: str, slices: Slices) -> Tensor:
        experts, inputs, outputs = slices
        blocks, scales = (self._read(entry, (experts, outputs)) for entry in self._packed[name])
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        values = torch.ldexp(_FP4[codes.int()], scales[..., None].int() - 127)
        return values.flatten(2).transpose(1, 2)[:, inputs].to(self._dequantised).contiguous()

    def _read(self, entry: _Entry, slices: Slices | None = None) -> Tensor:
        # Opening reads the header, a millisecond per thousand tensors; what is read stays mapped until then.
        if self._opened != entry.path or self._mapped > BLOCK_BYTES // 8:
            self._handle: Any = safe_open(entry.path, framework="pt")
            self._opened, self._mapped = entry.path, 0
        at: Any = ... if slices is None else slices
        if entry.stacked is not None:
            expert, first = entry.stacked
            rows, columns = slices or (slice(None), slice(None))
            start, stop, _ = rows.indices(entry.shape[0])
            at = (expert, slice(first + start, first + stop), columns)
        tensor: Tensor = self._handle.get_slice(entry.name)[at]
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
