"""Write a Megatron distributed checkpoint (``torch_dist``) from any reader; any layout can load it.

Parameters are written as one rank with the whole model would save them, but chunk by chunk, so memory does
not grow with the model. Layers and experts are one dimension each of a global tensor, Megatron's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.chunks import ChunkWriter, write_index
from megatron_fspo.weights.folder import copy_side_files, new_checkpoint
from megatron_fspo.weights.load import check_checkpoint, check_tied_copies
from megatron_fspo.weights.manifest import Manifest, TensorRecord, check_record, hashed_blocks, read_manifest
from megatron_fspo.weights.megatron_reader import SUBFOLDER
from megatron_fspo.weights.reader import Reader, check_finite, size_in_bytes
from megatron_fspo.weights.row import Row, shard_shape, shard_slices, to_megatron_shard
from megatron_fspo.weights.table import expected_hf_shapes, is_passed, whole_model


def write_megatron_checkpoint(
    out_dir: str | Path,
    reader: Reader,
    arch: Architecture,
    *,
    progress: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Convert the checkpoint of ``reader`` to ``out_dir``: config, tokenizer, manifest and ``torch_dist/``.

    Values keep their dtype. Tensors of several dtypes that Megatron fuses or stacks get a dtype that holds
    all exactly; the manifest has the original ones. ``progress`` is called with the bytes done since its last
    call.

    Raises:
        InputError: a tensor is missing, unexpected, mis-shaped, not finite, or unlike the source's manifest.
    """
    check_checkpoint(reader, arch)
    if others := [name for name in reader.names() if is_passed(name, arch)]:
        problem = f"has {min(others)}, which a Megatron checkpoint cannot hold: train from this folder itself"
        raise InputError(f"{reader.folder} {problem}")
    check_tied_copies(reader, arch)
    model = list(whole_model(arch))
    needed = size_in_bytes(reader, expected_hf_shapes(arch))
    with new_checkpoint(out_dir, reader.folder, needed) as folder:
        copy_side_files(reader.folder, folder, None)
        data = folder / SUBFOLDER
        data.mkdir()
        records: dict[str, TensorRecord] = {}
        source = read_manifest(reader.folder)
        recorded = source.tensors if source else {}

        def blocks(name: str) -> Iterator[Tensor]:
            """Yield consecutive finite rows, then check the tensor against the source's manifest."""
            for block in hashed_blocks(reader, name, records):
                check_finite(block, f"{reader.file(name)}: {name}")
                yield block
                progress(block.nbytes)
            check_record(name, records[name], recorded)

        with ChunkWriter(data) as writer:
            for key, dtype, shape in _global_tensors(reader, arch, model):
                writer.declare(key, dtype, shape)
            for row, layer, expert in model:
                if row.stacked and expert:
                    continue  # came with the first
                key, leading, _ = row.stored(arch, layer, expert)
                for first, values in _chunks(row.at(layer, expert), blocks, arch):
                    at = (*leading[:-1], first, 0) if row.stacked else (*leading, first)
                    writer.add(key, (*at, *(0 for _ in values.shape[1:])), values)
            _add_extra_states(writer, arch, model)
            writer.close()
        write_index(data, writer.index)
        manifest = Manifest.new("torch_dist", reader.folder, arch, {}, records)
        manifest.save(folder)
    return manifest


def _global_tensors(
    reader: Reader, arch: Architecture, model: list[tuple[Row, int, int]]
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    dtypes: dict[str, torch.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for row, layer, expert in model:
        key, _, leading = row.stored(arch, layer, expert)
        for name in row.at(layer, expert).files(arch):
            dtype = reader.dtype(name)
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
        shapes[key] = (*leading, *shard_shape(row, arch, 1, arch.vocab_size))
    for key, shape in shapes.items():
        yield key, dtypes[key], shape


def _chunks(
    row: Row, blocks: Callable[[str], Iterator[Tensor]], arch: Architecture
) -> Iterator[tuple[int, Tensor]]:
    """Yield first row, or number of the expert, and values of each chunk of a parameter."""
    shape = shard_shape(row, arch, 1, arch.vocab_size)
    if row.stacked:
        (name,) = row.files(arch)
        experts = (expert[None] for block in blocks(name) for expert in block)
        yield from ((at, to_megatron_shard(row, [one], arch, shape)) for at, one in enumerate(experts))
        return
    if row.layout == "qkv":
        whole = {name: torch.cat(list(blocks(name))) for name in row.files(arch)}
        slices = shard_slices(row, arch, 0, 1, arch.vocab_size)
        parts = [whole[tensor.name][part] for tensor, part in zip(row.hf, slices, strict=True)]
        yield 0, to_megatron_shard(row, parts, arch, shape)
        return
    first = 0
    for name in row.files(arch):  # up is below gate
        for block in blocks(name):
            yield first, block
            first += block.shape[0]


def _add_extra_states(writer: ChunkWriter, arch: Architecture, model: list[tuple[Row, int, int]]) -> None:
    """Add empty extra states (FP8 scales), which Transformer Engine's layers require when they load."""
    for row, layer, expert in model:
        key, offsets, whole = row.stored(arch, layer, expert)
        where = ".".join(map(str, offsets or (0,))) + "_" + ".".join(map(str, whole or (1,)))
        modules = [key.rpartition(".")[0]]
        if "linear_qkv.weight" in key:
            modules.append(key.replace("linear_qkv.weight", "core_attention"))
        for module in modules:
            writer.add_object(f"{module}._extra_state/shard_{where}", [None])
