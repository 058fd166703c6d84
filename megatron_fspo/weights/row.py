"""A row of the table: one Megatron parameter, its Hugging Face tensors, and how they correspond.

A row is all that the conversion knows about a parameter. Its Megatron side lists every name of the parameter:
the local layer specification has separate norms, Transformer Engine's fuses them into the next linear layer.

Layouts, with tp the tensor-parallel size:

========== ==================================================================================================
replicated the same on every rank
row        dimension 1 in tp equal parts
column     dimension 0 in tp equal parts
qkv        groups of heads in tp equal parts; in each group the rows of the first tensor, the second, …
gate_up    on each rank: its part of gate, then its part of up
vocab      dimension 0 in tp equal parts, after padding with zero rows to Megatron's vocabulary
transposed on every rank, with rows and columns exchanged (of experts only)
in_turn    the same of gate_up, whose rows of gate and up take turns in the files
========== ==================================================================================================

:func:`shard_slices` returns the part of each Hugging Face tensor that a rank reads. :func:`to_megatron_shard`
combines these parts, and :func:`from_megatron_shards` inverts both over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.weights.architecture import Architecture, check_tensor_parallel
from megatron_fspo.weights.reader import Slices

ShardLayout = Literal["replicated", "row", "column", "qkv", "gate_up", "vocab", "transposed", "in_turn"]
Size = Literal[
    "vocab_size", "hidden_size", "q_size", "kv_size", "head_dim", "value_size", "ffn_size", "num_experts",
    "expert_ffn_size", "expert_gate_up_size", "shared_ffn_size", "latent.q_rank", "latent.kv_rank",
    "latent.kv_down_size", "kv_up_size", "num_heads", "one", "lora_rank", "q_rows", "linear.keys",
    "linear.values", "linear.value_heads", "linear.value_size", "linear.conv", "linear.qkvz", "linear.ba",
]  # fmt: skip


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face checkpoint; ``sizes`` are names of :class:`Architecture` attributes.

    Tensors of one row with the same name are one tensor in the files, in the row's order along dimension 0.
    """

    name: str
    sizes: tuple[Size, ...]

    def shape(self, arch: Architecture) -> tuple[int, ...]:
        return tuple(attrgetter(size)(arch) for size in self.sizes)


@dataclass(frozen=True)
class Row:
    """One Megatron parameter. :func:`resolve` replaces ``{layer}`` and ``{expert}`` in the tables' names."""

    layout: ShardLayout
    megatron: tuple[str, ...]
    """All names of the parameter; a resolved row has only the requested one."""
    hf: tuple[HFTensor, ...]
    """The tensors that form it, in the layout's order."""
    key: str
    """Its name in a Megatron distributed checkpoint, where all layers (and experts) are one tensor."""
    copy: bool = False
    """It duplicates another row's parameter: it is loaded but never exported."""
    layers: Literal["all", "dense", "experts", "softmax", "linear"] = "all"
    """The layers that have it: with an MLP, with experts; with softmax attention, with linear attention."""
    when: Callable[[Architecture], object] = lambda arch: True
    """Whether models of the family have it."""
    stacked: bool = False
    """In the files all experts of a layer are one tensor, of one more dimension, the first."""
    expert: int = 0
    """Of a resolved row: the number of its expert in the layer."""

    @property
    def rearranged(self) -> bool:
        """Rows of the parameter are not rows of the files, in order."""
        return self.stacked or self.layout == "qkv"

    @property
    def in_layer(self) -> bool:
        return "{layer}" in self.megatron[0]

    @property
    def in_expert(self) -> bool:
        """Experts are distributed by expert parallelism, and not split by tensor parallelism."""
        return ".experts." in self.key

    def is_in(self, arch: Architecture, layer: int) -> bool:
        """Return True if this layer of the model has the parameter."""
        if self.layers in ("softmax", "linear"):
            return (self.layers == "linear") == (arch.layer_type(layer) == "linear")
        return self.layers == "all" or (self.layers == "dense") == (layer < arch.dense_layers)

    def groups(self, arch: Architecture) -> int:
        """Return the number of groups of heads in the layout qkv: those that share a key head."""
        return arch.linear.key_heads if self.layers == "linear" and arch.linear else arch.num_kv_heads

    def files(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Return name → shape of its tensors in the files."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor in self.hf:
            first, *others = tensor.shape(arch)
            shapes[tensor.name] = (shapes.get(tensor.name, (0,))[0] + first, *others)
        if self.stacked:
            return {name: (arch.num_experts, *shape) for name, shape in shapes.items()}
        return shapes

    def stored(
        self, arch: Architecture, layer: int, expert: int
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return key, and index and size of the leading dimensions, in a distributed checkpoint: layers are
        one tensor unless they differ in their parameters."""
        experts = [(expert, arch.num_experts)] if self.in_expert else []
        layers = [(layer, arch.num_layers)] if self.in_layer and arch.uniform else []
        key = self.key if arch.uniform else self.key.replace("decoder.layers.", f"decoder.layers.{layer}.")
        index, sizes = ([pair[i] for pair in layers + experts] for i in (0, 1))
        return key, tuple(index), tuple(sizes)

    def at(self, layer: int, expert: int = 0) -> Row:
        """Return the row of one layer and expert, numbered over the whole model."""
        hf = tuple(replace(t, name=t.name.format(layer=layer, expert=expert)) for t in self.hf)
        return replace(self, hf=hf, expert=expert)


def shard_shape(row: Row, arch: Architecture, tp_size: int, padded_vocab: int) -> tuple[int, ...]:
    """Return the shape of the Megatron parameter on one rank."""
    first, *others = [tensor.shape(arch) for tensor in row.hf]
    match row.layout:
        case "replicated":
            return first
        case "row":
            return (first[0], first[1] // tp_size)
        case "column":
            return (first[0] // tp_size, *first[1:])
        case "vocab":
            return (padded_vocab // tp_size, *first[1:])
        case "transposed" | "in_turn":
            return first[::-1]
        case "qkv" | "gate_up":
            rows = first[0] + sum(shape[0] for shape in others)
            return (rows // tp_size, *first[1:])


def shard_slices(row: Row, arch: Architecture, tp_rank: int, tp_size: int, padded_vocab: int) -> list[Slices]:
    """Return the part of each Hugging Face tensor of ``row`` that one rank holds.

    Heads of a group are adjacent in each tensor, so a range of groups is a range of rows.
    """
    check_tensor_parallel(arch, tp_size, padded_vocab)
    parts = []
    above: dict[str, int] = {}  # rows of the tensors before it in the same tensor of the files
    for tensor in row.hf:
        shape = tensor.shape(arch)
        part = [slice(0, size) for size in shape]
        if row.layout != "replicated":
            dim = 1 if row.layout == "row" else 0
            step = (padded_vocab if row.layout == "vocab" else shape[dim]) // tp_size
            # Padding of the vocabulary is not read.
            part[dim] = slice(min(tp_rank * step, shape[dim]), min((tp_rank + 1) * step, shape[dim]))
        first = above.get(tensor.name, 0)
        part[0] = slice(first + part[0].start, first + part[0].stop)
        above[tensor.name] = first + shape[0]
        parts.append((*([slice(row.expert, row.expert + 1)] if row.stacked else []), *part))
    return parts


def to_megatron_shard(
    row: Row, parts: Sequence[Tensor], arch: Architecture, shape: tuple[int, ...]
) -> Tensor:
    """Combine the parts that :func:`shard_slices` selects into one rank's parameter of the given shape."""
    parts = [part[0] for part in parts] if row.stacked else parts
    match row.layout:
        case "replicated" | "row" | "column":
            (shard,) = parts
        case "gate_up":
            shard = torch.cat(list(parts))
        case "qkv":
            groups = row.groups(arch) * shape[0] // sum(tensor.shape(arch)[0] for tensor in row.hf)
            shard = torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        case "transposed":
            shard = parts[0].transpose(0, -1)
        case "in_turn":
            rows = parts[0].transpose(0, -1)
            shard = torch.cat([rows[::2], rows[1::2]])
        case "vocab":
            (part,) = parts
            shard = part
            if padding := shape[0] - part.shape[0]:
                shard = torch.cat([part, part.new_zeros(padding, *shape[1:])])
    if tuple(shard.shape) != shape:
        raise InputError(f"{row.megatron[0]}: the parts form {tuple(shard.shape)}; the shard must be {shape}")
    return shard


def from_megatron_shards(row: Row, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    """Convert the shards of all tensor-parallel ranks, in rank order, to the tensors of ``row`` in the files
    (:meth:`Row.files`), or to its expert's part of them, [1, ...]."""
    tp_size = len(shards)
    vocab_rows = shards[0].shape[0] if row.layout == "vocab" else arch.vocab_size  # unused otherwise
    padded_vocab = tp_size * vocab_rows
    check_tensor_parallel(arch, tp_size, padded_vocab)
    expected = shard_shape(row, arch, tp_size, padded_vocab)
    for rank, shard in enumerate(shards):
        if tuple(shard.shape) != expected:
            got = f"shape {tuple(shard.shape)} on tensor-parallel rank {rank} of {tp_size}"
            raise InputError(f"{row.megatron[0]}: {got}; config.json requires {expected}")
    whole = _joined(row, shards, arch)
    return [tensor[None] for tensor in whole] if row.stacked else whole


def _joined(row: Row, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    match row.layout:
        case "replicated":
            # If replicas differ, gradients were not reduced, and none of them is the model.
            first, *others = (shard.contiguous().view(torch.uint8) for shard in shards)
            for rank, other in enumerate(others, 1):
                if not torch.equal(first, other):
                    name = row.megatron[0]
                    raise TrainingError(f"{name} differs between tensor-parallel ranks 0 and {rank}")
            return [shards[0]]
        case "row" | "column":
            return [torch.cat(list(shards), dim=1 if row.layout == "row" else 0)]
        case "vocab":
            return [torch.cat(list(shards))[: arch.vocab_size]]
        case "transposed":
            return [shards[0].transpose(0, -1)]
        case "in_turn":
            return [torch.stack(shards[0].chunk(2), dim=1).flatten(0, 1).transpose(0, -1)]
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return _merged(row, [torch.cat(half) for half in zip(*halves, strict=True)])
        case "qkv":
            group = [tensor.shape(arch)[0] // row.groups(arch) for tensor in row.hf]
            groups = torch.cat([shard.view(-1, sum(group), *shard.shape[1:]) for shard in shards])
            return _merged(row, [part.flatten(0, 1) for part in torch.split(groups, group, dim=1)])


def _merged(row: Row, values: Sequence[Tensor]) -> list[Tensor]:
    """Join the tensors of ``row`` that are one in the files."""
    joined: dict[str, list[Tensor]] = {}
    for tensor, value in zip(row.hf, values, strict=True):
        joined.setdefault(tensor.name, []).append(value)
    return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in joined.values()]
