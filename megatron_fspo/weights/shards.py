"""Between whole Hugging Face tensors and the shards of tensor-parallel ranks: pure functions of tensors.

:func:`shard_slices` says which part of each Hugging Face tensor a rank holds, so that a rank reads no more;
:func:`to_megatron_shard` puts the parts together; :func:`from_megatron_shards` is its inverse over all ranks,
and drops the vocabulary padding. Only :mod:`.table` knows names; a row here is a resolved one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.weights.architecture import Architecture, check_tensor_parallel
from megatron_fspo.weights.reader import Slices
from megatron_fspo.weights.table import Row


def shard_shape(row: Row, arch: Architecture, tp_size: int, padded_vocab: int) -> tuple[int, ...]:
    """The shape of the Megatron parameter on one rank."""
    first, *others = [tensor.shape(arch) for tensor in row.hf]
    match row.layout:
        case "replicated":
            return first
        case "row":
            return (first[0], first[1] // tp_size)
        case "vocab":
            return (padded_vocab // tp_size, *first[1:])
        case "qkv" | "gate_up":
            rows = first[0] + sum(shape[0] for shape in others)
            return (rows // tp_size, *first[1:])


def shard_slices(row: Row, arch: Architecture, tp_rank: int, tp_size: int, padded_vocab: int) -> list[Slices]:
    """The part of each Hugging Face tensor of ``row`` that one rank holds.

    Query heads of one group are neighbours in ``q_proj``, so the parts of a run of query groups are runs too.
    """
    check_tensor_parallel(arch, tp_size, padded_vocab)
    parts = []
    for tensor in row.hf:
        shape = tensor.shape(arch)
        part = [slice(0, size) for size in shape]
        if row.layout != "replicated":
            dim = 1 if row.layout == "row" else 0
            step = (padded_vocab if row.layout == "vocab" else shape[dim]) // tp_size
            # Beyond the real vocabulary there is nothing to read.
            part[dim] = slice(min(tp_rank * step, shape[dim]), min((tp_rank + 1) * step, shape[dim]))
        parts.append(tuple(part))
    return parts


def to_megatron_shard(
    row: Row, parts: Sequence[Tensor], arch: Architecture, shape: tuple[int, ...]
) -> Tensor:
    """One rank's parameter, of :func:`shard_shape`, from the parts :func:`shard_slices` names."""
    match row.layout:
        case "replicated" | "row":
            (shard,) = parts
        case "gate_up":
            shard = torch.cat(list(parts))
        case "qkv":
            groups = parts[1].shape[0] // arch.head_dim
            shard = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
        case "vocab":
            (part,) = parts
            shard = part
            if padding := shape[0] - part.shape[0]:
                shard = torch.cat([part, part.new_zeros(padding, *shape[1:])])
    if tuple(shard.shape) != shape:
        raise InputError(f"{row.megatron[0]}: parts make shape {tuple(shard.shape)}, the shard has {shape}")
    return shard


def from_megatron_shards(row: Row, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    """The Hugging Face tensors of ``row`` from its shards on all tensor-parallel ranks, in rank order."""
    tp_size = len(shards)
    vocab_rows = shards[0].shape[0] if row.layout == "vocab" else arch.vocab_size  # else unused
    padded_vocab = tp_size * vocab_rows
    check_tensor_parallel(arch, tp_size, padded_vocab)
    expected = shard_shape(row, arch, tp_size, padded_vocab)
    for rank, shard in enumerate(shards):
        if tuple(shard.shape) != expected:
            found = f"shape {tuple(shard.shape)} on tensor-parallel rank {rank} of {tp_size}"
            raise InputError(f"{row.megatron[0]}: {found}; the architecture has {expected}")
    match row.layout:
        case "replicated":
            _check_replicas(row, shards)
            return [shards[0]]
        case "row":
            return [torch.cat(list(shards), dim=1)]
        case "vocab":
            return [torch.cat(list(shards))[: arch.vocab_size]]
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat(half) for half in zip(*halves, strict=True)]
        case "qkv":
            group = [arch.q_size // arch.num_kv_heads, arch.head_dim, arch.head_dim]
            groups = torch.cat([shard.unflatten(0, (-1, sum(group))) for shard in shards])
            return [part.flatten(0, 1) for part in groups.split(group, dim=1)]


def _check_replicas(row: Row, shards: Sequence[Tensor]) -> None:
    """Replicas that drifted apart mean gradients were not reduced: no one of them is the model."""
    first = shards[0].contiguous().view(torch.uint8)
    for rank, shard in enumerate(shards):
        if not torch.equal(first, shard.contiguous().view(torch.uint8)):
            raise TrainingError(f"{row.megatron[0]} differs between tensor-parallel ranks 0 and {rank}")
