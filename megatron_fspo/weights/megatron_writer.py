"""Write a Megatron distributed checkpoint (``torch_dist``) from any reader, for any layout to load.

The parameters are written as a rank that holds the whole model would have them, chunk by chunk, so memory
does not grow with the model; ``megatron.core.dist_checkpointing.load`` cuts them as the layout that loads
wants. Layers and experts are one dimension each of a global tensor, Megatron's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.chunks import ChunkWriter, write_index
from megatron_fspo.weights.folder import copy_side_files, new_checkpoint
from megatron_fspo.weights.load import check_checkpoint, check_tied_copies
from megatron_fspo.weights.manifest import Manifest, TensorRecord, check_record, hashed_blocks, read_manifest
from megatron_fspo.weights.megatron_reader import SUBFOLDER
from megatron_fspo.weights.reader import Reader, check_finite, size_in_bytes
from megatron_fspo.weights.table import Row, expected_hf_shapes, shard_shape, to_megatron_shard, whole_model


def write_megatron_checkpoint(
    out_dir: str | Path,
    reader: Reader,
    arch: Architecture,
    *,
    progress: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Convert the checkpoint of ``reader`` to ``out_dir``: config and tokenizer, manifest, ``torch_dist/``.
    ``progress`` is called with the number of bytes done since the last call.

    Values keep their dtype; where Megatron fuses tensors, or stacks layers, of several dtypes, the widest
    holds all exactly, and the manifest remembers what each was.

    Raises:
        InputError: names the tensor and file that is missing, foreign, of another shape, or not finite.
    """
    check_checkpoint(reader, arch)
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
            """Consecutive rows, finite; at the end the tensor is what the source's manifest says."""
            for block in hashed_blocks(reader, name, records):
                check_finite(block, f"{reader.file(name)}: {name}")
                yield block
                progress(block.nbytes)
            check_record(name, records[name], recorded)

        with ChunkWriter(data) as writer:
            for key, dtype, shape in _global_tensors(reader, arch, model):
                writer.declare(key, dtype, shape)
            for row, layer, expert in model:
                leading = _leading(row, layer, expert)
                for first, values in _chunks(row.at(layer, expert), blocks, arch):
                    offsets = (*leading, first, *(0 for _ in values.shape[1:]))
                    writer.add(row.key, offsets, values)
            _add_extra_states(writer, arch, model)
            writer.close()
        write_index(data, writer.index)
        manifest = Manifest.new("torch_dist", reader.folder, arch, {}, records)
        manifest.save(folder)
    return manifest


def _leading(row: Row, layer: int, expert: int) -> tuple[int, ...]:
    """A parameter's index along the dimensions of layers and experts, those it has."""
    return (layer,) * row.of_layer + (expert,) * row.of_expert


def _global_tensors(
    reader: Reader, arch: Architecture, model: list[tuple[Row, int, int]]
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Key, dtype and shape of every tensor of the checkpoint."""
    dtypes: dict[str, torch.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for row, layer, expert in model:
        for tensor in row.at(layer, expert).hf:
            dtype = reader.dtype(tensor.name)
            dtypes[row.key] = torch.promote_types(dtypes.get(row.key, dtype), dtype)
        leading = _leading(row, arch.num_layers, arch.num_experts)
        shapes[row.key] = (*leading, *shard_shape(row, arch, 1, arch.vocab_size))
    for key, shape in shapes.items():
        yield key, dtypes[key], shape


def _chunks(
    row: Row, blocks: Callable[[str], Iterator[Tensor]], arch: Architecture
) -> Iterator[tuple[int, Tensor]]:
    """First row and values of the pieces a parameter is written in."""
    if row.layout == "qkv":
        parts = [torch.cat(list(blocks(tensor.name))) for tensor in row.hf]
        yield 0, to_megatron_shard(row, parts, arch, shard_shape(row, arch, 1, arch.vocab_size))
        return
    first = 0
    for tensor in row.hf:  # gate and up are one below the other
        for block in blocks(tensor.name):
            yield first, block
            first += block.shape[0]


def _add_extra_states(writer: ChunkWriter, arch: Architecture, model: list[tuple[Row, int, int]]) -> None:
    """Transformer Engine's layers ask for an extra state (their FP8 scales); they start without one."""
    for row, layer, expert in model:
        offsets, whole = _leading(row, layer, expert), _leading(row, arch.num_layers, arch.num_experts)
        where = ".".join(map(str, offsets or (0,))) + "_" + ".".join(map(str, whole or (1,)))
        modules = [row.key.rpartition(".")[0]]
        if row.layout == "qkv":
            modules.append(row.key.replace("linear_qkv.weight", "core_attention"))
        for module in modules:
            writer.add_object(f"{module}._extra_state/shard_{where}", [None])
