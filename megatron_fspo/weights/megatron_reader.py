"""Read a Megatron distributed checkpoint (``torch_dist``) of any layout as Hugging Face tensors.

Each parameter is one global tensor, with layers along the first dimension and experts along the next, cut
into chunks. Reading needs neither Megatron nor a process group. Optimizer and random states are ignored.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.chunks import Box, ChunkReader
from megatron_fspo.weights.manifest import read_manifest
from megatron_fspo.weights.reader import Slices
from megatron_fspo.weights.row import Row, from_megatron_shards, shard_shape
from megatron_fspo.weights.safe_pickle import METADATA
from megatron_fspo.weights.table import whole_model

SUBFOLDER = "torch_dist"
_NOT_WEIGHTS = re.compile(r"(.*\.)?(optimizer|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*")


@dataclass(frozen=True)
class _Source:
    """Tensor ``index`` of ``row``, which is stored at layer and expert ``at`` of ``key``. A tensor of all
    experts has the source of the first."""

    row: Row
    index: int
    key: str
    at: tuple[int, ...]


class MegatronReader:
    """The tensors of a distributed checkpoint by their Hugging Face names; a :class:`Reader`.

    ``.metadata`` is in the folder or in its ``torch_dist``. A tensor is read in the dtype that the manifest
    records, the one before conversion, or without a manifest in the stored one.

    Raises:
        InputError: a tensor or file is missing, unexpected, mis-shaped, damaged or unsafe.
    """

    def __init__(self, checkpoint_dir: str | Path, arch: Architecture) -> None:
        self.folder = Path(checkpoint_dir)
        self.arch = arch
        self._reader = ChunkReader(data_folder(self.folder))
        self._index = self._reader.folder / METADATA
        manifest = read_manifest(self.folder)
        self._recorded = manifest.tensors if manifest else {}
        self._sources = dict(self._find_sources())
        known = {source.key: len(source.at) for source in self._sources.values()}
        weights = {key for key in self._reader.tensors if not _NOT_WEIGHTS.fullmatch(key)}
        if foreign := weights - known.keys():
            problem = f"has {min(foreign)}, which is not in the {arch.model_type} model of config.json"
            raise InputError(f"{self._index} {problem}")
        # The chunks that overlap each layer and expert.
        self._chunks: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
        for key, leading in known.items():
            for chunk in self._reader.chunks(key):
                ranges = [range(o, o + size) for o, size in zip(*chunk, strict=True)]
                for at in itertools.product(*ranges[:leading]):
                    self._chunks.setdefault((key, at), []).append(chunk)
        # What was read last, as q, k and v are stored as one tensor.
        self._fused: tuple[tuple[str, tuple[int, ...]], list[Tensor]] | None = None

    def _find_sources(self) -> Iterable[tuple[str, _Source]]:
        for row, layer, expert in whole_model(self.arch):
            key, at, sizes = row.stored(self.arch, layer, expert)
            # Megatron may save the layers of any model separately, each under its number.
            alone = row.key.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
            if key != alone and alone in self._reader:
                key, at, sizes = alone, at[row.in_layer :], sizes[row.in_layer :]
            if key not in self._reader:
                raise InputError(f"{self._index} has no {key}; config.json requires it")
            shape = self._reader.shape(key)
            expected = (*sizes, *shard_shape(row, self.arch, 1, self.arch.vocab_size))
            # Megatron may pad the vocabulary.
            longer = row.layout == "vocab" and shape and shape[0] > expected[0]
            if shape != (shape[:1] + expected[1:] if longer else expected):
                raise InputError(f"{self._index}: {key} is {shape}; config.json requires {expected}")
            for index, name in enumerate(row.at(layer, expert).files(self.arch)):
                if not (row.stacked and expert):
                    yield name, _Source(row, index, key, at)

    def names(self) -> set[str]:
        return set(self._sources)

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            raise InputError(f"{self.folder} has no tensor {name}")
        return self._sources[name]

    def file(self, name: str) -> Path:
        source = self._source(name)
        chunks = self._chunks.get((source.key, source.at))
        return self._reader.file(source.key, chunks[0]) if chunks else self._index

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._source(name)
        return [*source.row.files(self.arch).values()][source.index]

    def dtype(self, name: str) -> torch.dtype:
        if name in self._recorded:
            return self._recorded[name].dtype
        dtype, _ = self._reader.tensors[self._source(name).key]
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise InputError(f"{self._index}: {name} is {dtype}; only plain floats are supported")
        return dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        source, shape = self._source(name), self.shape(name)
        wanted = slices or tuple(slice(0, size) for size in shape)
        if source.row.stacked:
            experts = range(*wanted[0].indices(shape[0]))
            sources = [replace(source, at=(*source.at[:-1], one)) for one in experts or [0]]
            whole = torch.cat([self._rearranged(one)[0] for one in sources])
            values = whole[: len(experts), *wanted[1:]]
        elif source.row.rearranged:
            values = self._rearranged(source)[source.index][wanted]
        else:
            base = source.index * shape[0]  # up is below gate
            (first, end), *others = [part.indices(size)[:2] for part, size in zip(wanted, shape, strict=True)]
            values = self._read_ranges(source, [(base + first, base + end), *others])
        return values.to(self.dtype(name))

    def _rearranged(self, source: _Source) -> list[Tensor]:
        """Return the tensors of a row as in the files, such as q, k and v; those of the last are cached."""
        where = (source.key, source.at)
        if self._fused is None or self._fused[0] != where:
            shape = shard_shape(source.row, self.arch, 1, self.arch.vocab_size)
            fused = self._read_ranges(source, [(0, size) for size in shape])
            self._fused = where, from_megatron_shards(source.row, [fused], self.arch)
        return self._fused[1]

    def _read_ranges(self, source: _Source, ranges: list[tuple[int, int]]) -> Tensor:
        """Read ranges of one layer's (and expert's) tensor from all chunks that overlap them."""
        offsets = (*source.at, *(first for first, _ in ranges))
        sizes = (*(1 for _ in source.at), *(end - first for first, end in ranges))
        values = torch.empty(sizes, dtype=self._reader.tensors[source.key][0])
        among = self._chunks.get((source.key, source.at), [])
        self._reader.read_into(source.key, [((offsets, sizes), values)], among)
        return values.view(sizes[len(source.at) :])


def data_folder(checkpoint_dir: Path) -> Path:
    """Return the folder with ``.metadata``: ``checkpoint_dir`` or its subfolder ``torch_dist``."""
    return checkpoint_dir if (checkpoint_dir / METADATA).is_file() else checkpoint_dir / SUBFOLDER
