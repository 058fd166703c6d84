"""Between a checkpoint and the parameters of a running model, one tensor at a time, and strictly.

Every tensor of the checkpoint is accounted for before the first is read: a missing, unexpected or mis-shaped
one is an error that names it, as is a value that is not finite. No process group is used here: who a
rank is, and how to gather, are arguments.
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
from megatron_fspo.weights.safe_pickle import METADATA
from megatron_fspo.weights.table import (
    expected_hf_shapes,
    from_megatron_shards,
    resolve,
    shard_shape,
    shard_slices,
    tied_copies,
    to_megatron_shard,
)

logger = logging.getLogger(__name__)


def is_megatron(checkpoint_dir: Path) -> bool:
    """Return True if the folder holds a Megatron distributed checkpoint."""
    return (data_folder(checkpoint_dir) / METADATA).is_file()


def open_checkpoint(checkpoint_dir: Path, arch: Architecture) -> Reader:
    """Reader of a Hugging Face folder, or of a Megatron one; ``arch`` is what its config.json says."""
    return MegatronReader(checkpoint_dir, arch) if is_megatron(checkpoint_dir) else HFReader(checkpoint_dir)


def check_checkpoint(reader: Reader, arch: Architecture) -> None:
    """Raise ``InputError`` unless the files hold exactly the tensors of ``arch``. Reads headers only."""
    copies = tied_copies(arch)
    expected = expected_hf_shapes(arch)
    if missing := expected.keys() - reader.names():
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise InputError(f"{reader.folder} has no tensor {min(missing)}{others}; its config.json asks for it")
    expected |= {copy: expected[original] for copy, original in copies.items()}
    for name in sorted(reader.names()):
        file = reader.file(name)
        if name not in expected:
            raise InputError(f"{file} has {name}, which a {arch.model_type} model of its config.json has not")
        if reader.shape(name) != expected[name]:
            problem = f"{name} has shape {reader.shape(name)}; config.json makes it {expected[name]}"
            raise InputError(f"{file}: {problem}")
        reader.dtype(name)  # refuses what is not a plain float


def check_tied_copies(reader: Reader, arch: Architecture) -> None:
    """Raise ``InputError`` if a tied checkpoint repeats its embedding, and the two differ. Reads both."""
    for copy, original in tied_copies(arch).items():
        if copy in reader.names():
            for rows in row_blocks(reader.shape(copy), reader.dtype(copy).itemsize):
                _check_tied_copy(reader, original, copy, (rows, slice(0, arch.hidden_size)))


def check_coverage(loaded: Iterable[str], arch: Architecture) -> None:
    """Raise ``InputError`` unless ``loaded``, over all pipeline stages, is every tensor of ``arch``."""
    if missed := expected_hf_shapes(arch).keys() - set(loaded):
        raise InputError(f"{len(missed)} tensors went into no parameter, {min(missed)} among them")


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
    """Copy the checkpoint into ``parameters``, each rank reading its own part; returns the names it used.

    ``parameters`` are (name, tensor) of one model chunk as ``GPTModel.named_parameters()`` has them,
    ``layer_offset`` and ``expert_offset`` the numbers of layers before the chunk and of experts before this
    expert-parallel rank's. Give the union of what all ranks return to :func:`check_coverage`.
    """
    check_tensor_parallel(arch, tp_size, padded_vocab)
    check_checkpoint(reader, arch)
    copies = {original: copy for copy, original in tied_copies(arch).items() if copy in reader.names()}
    loaded: set[str] = set()
    for name, parameter in parameters:
        row = resolve(name, arch, layer_offset, expert_offset)
        rank, size = (0, 1) if row.of_expert else (tp_rank, tp_size)
        shape = shard_shape(row, arch, size, padded_vocab)
        if tuple(parameter.shape) != shape:
            own = tuple(parameter.shape)
            raise InputError(f"{name} has shape {own} in the model; config.json makes it {shape}")
        parts = []
        for tensor, slices in zip(row.hf, shard_slices(row, arch, rank, size, padded_vocab), strict=True):
            # On the parameter's device: that converts and checks it faster than one thread of the CPU.
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
    logger.info("%s: %s repeats the tied %s and is not needed", reader.file(copy), copy, name)


def iterate_hf_tensors(
    parameters: Iterable[tuple[str, Tensor]],
    arch: Architecture,
    gather: Callable[[Tensor], Sequence[Tensor] | None],
    layer_offset: int = 0,
    expert_offset: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of one model chunk, one parameter in memory at a time.

    ``gather(shard)`` returns the shards of all tensor-parallel ranks in rank order, or None on a rank that
    does not export. It is collective, so **every** rank must run this iterator to its end.
    """
    for name, parameter in parameters:
        row = resolve(name, arch, layer_offset, expert_offset)
        if row.copy:
            continue
        shards = gather(parameter.detach())
        if shards is not None:
            for tensor, value in zip(row.hf, from_megatron_shards(row, shards, arch), strict=True):
                yield tensor.name, value
