"""A Megatron distributed checkpoint (``torch_dist``) seen as Hugging Face tensors, whatever layout saved it.

In such a checkpoint every parameter is one global tensor, whole over tensor parallel, with all layers along
its first dimension and experts along the next, cut into chunks that each rank wrote. Reading needs no
Megatron and no process group. Optimizer and random states are left alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.manifest import read_manifest
from megatron_fspo.weights.reader import Slices
from megatron_fspo.weights.safe_pickle import METADATA, check_files, load_entry, read_metadata
from megatron_fspo.weights.shards import from_megatron_shards, shard_shape
from megatron_fspo.weights.table import Row, whole_model

SUBFOLDER = "torch_dist"
_NOT_WEIGHTS = re.compile(r"(.*\.)?(optimizer|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*")


@dataclass(frozen=True)
class _Place:
    """Where a Hugging Face tensor is: part ``index`` of a row, whose tensor lies at ``at`` of ``key``."""

    row: Row
    index: int
    key: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    info: Any
    """File, offset and length of its bytes."""


class MegatronReader:
    """The tensors of a distributed checkpoint under their Hugging Face names; a :class:`Reader`.

    A tensor is read as the dtype the manifest records, the one it had before conversion; without a manifest
    as it was saved.

    Args:
        checkpoint_dir: the folder with ``.metadata``, or one that has it in ``torch_dist``.
        arch: the model's.

    Raises:
        InputError: names the tensor or file that is missing, foreign, of another shape, damaged, or not to be
            trusted.
    """

    def __init__(self, checkpoint_dir: str | Path, arch: Architecture) -> None:
        self.folder = Path(checkpoint_dir)
        self.arch = arch
        self._data = data_folder(self.folder)
        self._metadata = read_metadata(self._data)
        check_files(self._data, self._metadata)
        manifest = read_manifest(self.folder)
        self._recorded = manifest.tensors if manifest else {}
        self._tensors = {
            key: stored
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not _NOT_WEIGHTS.fullmatch(key)
        }
        self._places = dict(self._find_places())
        known = {place.key for place in self._places.values()}
        if foreign := self._tensors.keys() - known:
            problem = f"has {min(foreign)}, which a {arch.model_type} model of its config.json has not"
            raise InputError(f"{self._data / METADATA} {problem}")
        self._chunks: dict[tuple[str, tuple[int, ...]], list[_Chunk]] = {}
        for key in known:
            self._list_chunks(key)
        # What was read last: the next part is often in it.
        self._fused: tuple[tuple[str, tuple[int, ...]], list[Tensor]] | None = None
        self._loaded: tuple[_Chunk, Tensor] | None = None

    def _find_places(self) -> Iterable[tuple[str, _Place]]:
        for row, layer, expert in whole_model(self.arch):
            experts = [(expert, self.arch.num_experts)] if row.of_expert else []
            layers = [(layer, self.arch.num_layers)] if row.of_layer else []
            # Layers that may differ are saved apart, each under its own number.
            alone = row.key.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
            key, leading = (alone, experts) if alone in self._tensors else (row.key, layers + experts)
            if key not in self._tensors:
                raise InputError(f"{self._data / METADATA} has no {key}; its config.json asks for it")
            self._check_shape(row, key, tuple(size for _, size in leading))
            for index, tensor in enumerate(row.at(layer, expert).hf):
                yield tensor.name, _Place(row, index, key, tuple(at for at, _ in leading))

    def _check_shape(self, row: Row, key: str, leading: tuple[int, ...]) -> None:
        found = tuple(self._tensors[key].size)
        expected = (*leading, *shard_shape(row, self.arch, 1, self.arch.vocab_size))
        # Megatron pads the vocabulary.
        rows = (max(found[0], expected[0]), *expected[1:]) if row.layout == "vocab" and found else expected
        if found != rows:
            raise InputError(f"{self._data / METADATA}: {key} is {found}; config.json makes it {expected}")

    def _list_chunks(self, key: str) -> None:
        """By the layer and expert they belong to."""
        whole = self._tensors[key].size
        leading = len(next(place.at for place in self._places.values() if place.key == key))
        for chunk in self._tensors[key].chunks:
            ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=False)]
            inside = [0 <= o < end <= n for o, end, n in zip(chunk.offsets, ends, whole, strict=False)]
            if not {len(chunk.offsets), len(chunk.sizes)} == {len(whole)} or not all(inside):
                odd = f"a chunk of {tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
                raise InputError(f"{self._data / METADATA}: {key} is {tuple(whole)}, and has {odd}")
            info = self._metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            if info is None:
                raise InputError(f"{self._data / METADATA}: no file for {key} at {tuple(chunk.offsets)}")
            found = _Chunk(tuple(chunk.offsets), tuple(chunk.sizes), info)
            ranges = [range(o, o + s) for o, s in zip(found.offsets[:leading], found.sizes, strict=False)]
            for at in itertools.product(*ranges):
                self._chunks.setdefault((key, at), []).append(found)

    def names(self) -> set[str]:
        return set(self._places)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise InputError(f"{self.folder} has no tensor {name}")
        return self._places[name]

    def file(self, name: str) -> Path:
        place = self._place(name)
        chunks = self._chunks.get((place.key, place.at), [])
        return self._data / (chunks[0].info.relative_path if chunks else METADATA)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        return place.row.hf[place.index].shape(self.arch)

    def dtype(self, name: str) -> torch.dtype:
        if name in self._recorded:
            return self._recorded[name].dtype
        dtype: torch.dtype = self._tensors[self._place(name).key].properties.dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise InputError(f"{self._data / METADATA}: {name} is {dtype}; only plain floats are supported")
        return dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        place, shape = self._place(name), self.shape(name)
        wanted = slices or tuple(slice(0, size) for size in shape)
        if place.row.layout == "qkv":
            values = self._parts(place)[place.index][wanted]
        else:
            base = place.index * shape[0]  # the second half of gate and up
            ranges = [part.indices(size)[:2] for part, size in zip(wanted, shape, strict=True)]
            (first, end), *others = ranges
            values = self._assemble(place, [(base + first, base + end), *others])
        return values.to(self.dtype(name))

    def _parts(self, place: _Place) -> list[Tensor]:
        """q, k and v of a layer; they come from one tensor, so all are kept until the next is asked for."""
        where = (place.key, place.at)
        if self._fused is None or self._fused[0] != where:
            shape = shard_shape(place.row, self.arch, 1, self.arch.vocab_size)
            fused = self._assemble(place, [(0, size) for size in shape])
            self._fused = where, from_megatron_shards(place.row, [fused], self.arch)
        return self._fused[1]

    def _assemble(self, place: _Place, ranges: list[tuple[int, int]]) -> Tensor:
        """Part of one layer's (and expert's) tensor, from all chunks that have some of it."""
        leading = len(place.at)
        found = torch.empty(
            [end - first for first, end in ranges], dtype=self._tensors[place.key].properties.dtype
        )
        boxes: list[list[tuple[int, int]]] = []
        for chunk in self._chunks.get((place.key, place.at), []):
            starts, sizes = chunk.offsets[leading:], chunk.sizes[leading:]
            shared = [
                (max(first, start), min(end, start + size))
                for (first, end), start, size in zip(ranges, starts, sizes, strict=True)
            ]
            if any(first >= end for first, end in shared):
                continue
            boxes.append(shared)
            values = self._load(place.key, chunk)
            source: list[int | slice] = [at - o for at, o in zip(place.at, chunk.offsets, strict=False)]
            source += [slice(f - start, e - start) for (f, e), start in zip(shared, starts, strict=True)]
            target = [slice(f - first, e - first) for (f, e), (first, _) in zip(shared, ranges, strict=True)]
            found[tuple(target)] = values[tuple(source)]
        filled = sum(math.prod(end - first for first, end in box) for box in boxes)
        overlapping = any(_overlap(a, b) for a, b in itertools.combinations(boxes, 2))
        if filled != found.numel() or overlapping:  # what overlaps could make up for a hole
            problem = (
                "chunks overlap in" if overlapping else f"chunks cover {filled} of {found.numel()} values of"
            )
            raise InputError(f"{self._data / METADATA}: {problem} {place.key} at {place.at}")
        return found

    def _load(self, key: str, chunk: _Chunk) -> Tensor:
        if self._loaded is None or self._loaded[0] is not chunk:
            self._loaded = None  # before the next takes memory
            values = load_entry(self._data, chunk.info)
            dtype = self._tensors[key].properties.dtype
            if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != (chunk.sizes, dtype):
                raise InputError(f"{self._data / chunk.info.relative_path}: {key} is not what the index says")
            self._loaded = chunk, values
        return self._loaded[1]


def _overlap(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))


def data_folder(checkpoint_dir: Path) -> Path:
    """Where ``.metadata`` is: the folder itself, or its ``torch_dist``."""
    return checkpoint_dir if (checkpoint_dir / METADATA).is_file() else checkpoint_dir / SUBFOLDER
