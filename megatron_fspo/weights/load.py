"""Load checkpoints into the parameters of a running model and export them, one tensor at a time.

Missing, unexpected or mis-shaped tensors are errors before the first tensor is read; values that are not
finite are errors too. No process group is used: ranks and the gather function are arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture, check_tensor_parallel
from megatron_fspo.weights.hf_reader import HFReader
from megatron_fspo.weights.megatron_reader import MegatronReader, data_folder
from megatron_fspo.weights.reader import Reader, Slices, check_finite, row_blocks
from megatron_fspo.weights.row import from_megatron_shards, shard_shape, shard_slices, to_megatron_shard
from megatron_fspo.weights.safe_pickle import METADATA
from megatron_fspo.weights.table import expected_hf_shapes, is_passed, is_unused, resolve, tied_copies

logger = logging.getLogger(__name__)
Stacks = dict[str, tuple[set[int], Tensor]]
"""Name of a tensor of all experts → the experts that are in it, and the tensor."""


def is_megatron(checkpoint_dir: Path) -> bool:
    """Return True if the folder holds a Megatron distributed checkpoint."""
    return (data_folder(checkpoint_dir) / METADATA).is_file()


def open_checkpoint(checkpoint_dir: Path, arch: Architecture) -> Reader:
    """Open a Hugging Face or Megatron folder; ``arch`` is the architecture in its config.json."""
    return MegatronReader(checkpoint_dir, arch) if is_megatron(checkpoint_dir) else HFReader(checkpoint_dir)


def check_checkpoint(reader: Reader, arch: Architecture) -> None:
    """Raise ``InputError`` unless the files contain exactly the tensors of ``arch``; reads headers only."""
    copies = tied_copies(arch)
    expected = expected_hf_shapes(arch)
    if missing := expected.keys() - reader.names():
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise InputError(f"{reader.folder} has no tensor {min(missing)}{others}, which config.json requires")
    expected |= {copy: expected[original] for copy, original in copies.items()}
    unused = {name for name in reader.names() if is_unused(name, arch) or is_passed(name, arch)}
    for name in sorted(reader.names() - unused):
        file = reader.file(name)
        if name not in expected:
            raise InputError(f"{file} has {name}, which is not in the {arch.model_type} model of config.json")
        if reader.shape(name) != expected[name]:
            problem = f"{name} has shape {reader.shape(name)}; config.json requires {expected[name]}"
            raise InputError(f"{file}: {problem}")
        reader.dtype(name)  # refuses what is not a plain float


def check_tied_copies(reader: Reader, arch: Architecture) -> None:
    """Raise ``InputError`` if a copy of a tied embedding differs from it; reads both."""
    for copy, original in tied_copies(arch).items():
        if copy in reader.names():
            for rows in row_blocks(reader.shape(copy), reader.dtype(copy).itemsize):
                _check_tied_copy(reader, original, copy, (rows, slice(0, arch.hidden_size)))


def check_coverage(loaded: Iterable[str], arch: Architecture) -> None:
    """Raise ``InputError`` unless ``loaded``, the union over all ranks, has every tensor of ``arch``."""
    if missed := expected_hf_shapes(arch).keys() - set(loaded):
        raise InputError(f"{len(missed)} tensors were not loaded into a parameter, such as {min(missed)}")


def load_into(
    parameters: Iterable[tuple[str, Tensor]],
    reader: Reader,
    arch: Architecture,
    *,
    tp_rank: int,
    tp_size: int,
    padded_vocab: int,
    layer_offset: int = 0,
    expert_offset: int = 0,
) -> set[str]:
    """Load one model chunk, reading only this rank's part; return the names of the tensors that were read.

    ``parameters`` are the chunk's ``GPTModel.named_parameters()``. The offsets are the numbers of layers
    before the chunk and of experts before this expert-parallel rank's. Pass the union of all ranks' results
    to :func:`check_coverage`.
    """
    check_tensor_parallel(arch, tp_size, padded_vocab)
    check_checkpoint(reader, arch)
    copies = {original: copy for copy, original in tied_copies(arch).items() if copy in reader.names()}
    loaded: set[str] = set()
    for name, parameter in parameters:
        row = resolve(name, arch, layer_offset, expert_offset)
        rank, size = (0, 1) if row.in_expert else (tp_rank, tp_size)
        shape = shard_shape(row, arch, size, padded_vocab)
        if tuple(parameter.shape) != shape:
            own = tuple(parameter.shape)
            raise InputError(f"{name} has shape {own} in the model; config.json requires {shape}")
        parts = []
        for tensor, slices in zip(row.hf, shard_slices(row, arch, rank, size, padded_vocab), strict=True):
            # The parameter's device may convert and check values faster than one CPU thread.
            values = reader.read(tensor.name, slices).to(parameter.device, parameter.dtype)
            check_finite(values, f"{reader.file(tensor.name)}: {tensor.name}")
            parts.append(values)
            if tensor.name in copies:
                _check_tied_copy(reader, tensor.name, copies[tensor.name], slices)
            loaded.add(tensor.name)
        with torch.no_grad():
            parameter.copy_(to_megatron_shard(row, parts, arch, shape))
    return loaded


def _check_tied_copy(reader: Reader, name: str, copy: str, slices: Slices) -> None:
    if not torch.equal(reader.read(copy, slices), reader.read(name, slices)):
        raise InputError(f"{reader.file(copy)}: {copy} differs from {name}, but config.json ties the two")
    logger.info("%s: %s duplicates the tied %s and is ignored", reader.file(copy), copy, name)


def iterate_hf_tensors(
    parameters: Iterable[tuple[str, Tensor]],
    arch: Architecture,
    gather: Callable[[Tensor], Sequence[Tensor] | None],
    layer_offset: int = 0,
    expert_offset: int = 0,
    stacks: Stacks | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of one model chunk, with one parameter in memory at a time. Collective.

    ``gather(shard)`` is a collective that returns all tensor-parallel ranks' shards in rank order, or None on
    a rank that does not export. **Every** rank must exhaust this iterator. A tensor of all experts comes with
    the last of them; ``stacks`` holds those that are incomplete, for experts from several calls.
    """
    stacks = {} if stacks is None else stacks
    for name, parameter in parameters:
        row = resolve(name, arch, layer_offset, expert_offset)
        if row.copy:
            continue
        shards = gather(parameter.detach())
        if shards is None:
            continue
        for file, tensor in zip(row.files(arch), from_megatron_shards(row, shards, arch), strict=True):
            if not row.stacked:
                yield file, tensor
                continue
            if file not in stacks:
                stacks[file] = set(), tensor.new_empty(arch.num_experts, *tensor.shape[1:])
            experts, whole = stacks[file]
            whole[row.expert] = tensor[0]
            experts.add(row.expert)
            if len(experts) == arch.num_experts:
                yield file, stacks.pop(file)[1]
