"""One table per architecture, which maps Hugging Face tensors to Megatron parameters in both directions.

A row is all that the conversion knows about a parameter. Its Megatron side lists every name of the parameter:
the local layer specification has separate norms, Transformer Engine's fuses them into the next linear layer.

Layouts, with tp the tensor-parallel size:

========== ==================================================================================================
replicated the same on every rank
row        dimension 1 in tp equal parts
column     dimension 0 in tp equal parts
qkv        query groups in tp equal parts; in each group the query heads, the key head, the value head
gate_up    on each rank: its part of gate, then its part of up
vocab      dimension 0 in tp equal parts, after padding with zero rows to Megatron's vocabulary
========== ==================================================================================================

:func:`shard_slices` returns the part of each Hugging Face tensor that a rank reads. :func:`to_megatron_shard`
combines these parts, and :func:`from_megatron_shards` inverts both over all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.weights.architecture import Architecture, check_tensor_parallel
from megatron_fspo.weights.reader import Slices

ShardLayout = Literal["replicated", "row", "column", "qkv", "gate_up", "vocab"]
Size = Literal[
    "vocab_size", "hidden_size", "q_size", "kv_size", "head_dim", "ffn_size", "num_experts",
    "expert_ffn_size", "lora_rank",
]  # fmt: skip


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face checkpoint; ``sizes`` are names of :class:`Architecture` attributes."""

    name: str
    sizes: tuple[Size, ...]

    def shape(self, arch: Architecture) -> tuple[int, ...]:
        return tuple(getattr(arch, size) for size in self.sizes)


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

    @property
    def in_layer(self) -> bool:
        return "{layer}" in self.megatron[0]

    @property
    def in_expert(self) -> bool:
        """Experts are distributed by expert parallelism, and not split by tensor parallelism."""
        return ".experts." in self.key

    def at(self, layer: int, expert: int = 0) -> Row:
        """Return the row of one layer and expert, numbered over the whole model."""
        hf = tuple(replace(t, name=t.name.format(layer=layer, expert=expert)) for t in self.hf)
        return replace(self, hf=hf)


def _row(
    layout: ShardLayout, megatron: str, *hf: HFTensor, key: str | None = None, copy: bool = False
) -> Row:
    """``key`` defaults to the last name, Transformer Engine's, without the layer number."""
    names = tuple(megatron.split(" | "))
    return Row(layout, names, hf, key or names[-1].replace("{layer}.", ""), copy)


def _hf(name: str, *sizes: Size) -> HFTensor:
    return HFTensor(name, sizes)


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

# fmt: off
_EMBED = _hf("model.embed_tokens.weight", "vocab_size", "hidden_size")
_HEAD = _hf("lm_head.weight", "vocab_size", "hidden_size")

_COMMON = (
    _row("vocab", "embedding.word_embeddings.weight", _EMBED),
    _row("replicated", f"{_M}input_layernorm.weight | {_M}self_attention.linear_qkv.layer_norm_weight",
         _hf(f"{_H}input_layernorm.weight", "hidden_size")),
    _row("qkv", f"{_M}self_attention.linear_qkv.weight",
         _hf(f"{_H}self_attn.q_proj.weight", "q_size", "hidden_size"),
         _hf(f"{_H}self_attn.k_proj.weight", "kv_size", "hidden_size"),
         _hf(f"{_H}self_attn.v_proj.weight", "kv_size", "hidden_size")),
    _row("replicated", "decoder.final_layernorm.weight", _hf("model.norm.weight", "hidden_size")),
)
_QKV_BIAS = (
    _row("qkv", f"{_M}self_attention.linear_qkv.bias",
         _hf(f"{_H}self_attn.q_proj.bias", "q_size"),
         _hf(f"{_H}self_attn.k_proj.bias", "kv_size"),
         _hf(f"{_H}self_attn.v_proj.bias", "kv_size")),
)
_QK_NORM = (
    _row("replicated", f"{_M}self_attention.q_layernorm.weight",
         _hf(f"{_H}self_attn.q_norm.weight", "head_dim")),
    _row("replicated", f"{_M}self_attention.k_layernorm.weight",
         _hf(f"{_H}self_attn.k_norm.weight", "head_dim")),
)
_OUT = (
    _row("row", f"{_M}self_attention.linear_proj.weight",
         _hf(f"{_H}self_attn.o_proj.weight", "hidden_size", "q_size")),
)
_MLP = (
    _row("replicated", f"{_M}pre_mlp_layernorm.weight | {_M}mlp.linear_fc1.layer_norm_weight",
         _hf(f"{_H}post_attention_layernorm.weight", "hidden_size")),
    _row("gate_up", f"{_M}mlp.linear_fc1.weight",
         _hf(f"{_H}mlp.gate_proj.weight", "ffn_size", "hidden_size"),
         _hf(f"{_H}mlp.up_proj.weight", "ffn_size", "hidden_size")),
    _row("row", f"{_M}mlp.linear_fc2.weight", _hf(f"{_H}mlp.down_proj.weight", "hidden_size", "ffn_size")),
)


def _moe(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Experts as separate modules (local specification) or one grouped product (Transformer Engine)."""
    one = f"{_H}{block}.experts.{{expert}}"
    return (
        _row("replicated", f"{_M}pre_mlp_layernorm.weight",
             _hf(f"{_H}post_attention_layernorm.weight", "hidden_size")),
        _row("replicated", f"{_M}mlp.router.weight",
             _hf(f"{_H}{block}.gate.weight", "num_experts", "hidden_size")),
        _row("gate_up", f"{_M}mlp.experts.local_experts.{{expert}}.linear_fc1.weight"
             f" | {_M}mlp.experts.linear_fc1.weight{{expert}}",
             _hf(f"{one}.{gate}.weight", "expert_ffn_size", "hidden_size"),
             _hf(f"{one}.{up}.weight", "expert_ffn_size", "hidden_size"),
             key="decoder.layers.mlp.experts.experts.linear_fc1.weight"),
        _row("row", f"{_M}mlp.experts.local_experts.{{expert}}.linear_fc2.weight"
             f" | {_M}mlp.experts.linear_fc2.weight{{expert}}",
             _hf(f"{one}.{down}.weight", "hidden_size", "expert_ffn_size"),
             key="decoder.layers.mlp.experts.experts.linear_fc2.weight"),
    )


def _adapter(linear: str, target: str, hf: str, outputs: Size, inputs: Size) -> tuple[Row, Row]:
    """Return A and B of a target in a linear layer, with PEFT's tensor names without its prefix."""
    name, column = f"{_M}{linear}.adapters.{target}", linear.endswith(("qkv", "fc1"))
    a = _hf(f"{_H}{hf}.lora_A.weight", "lora_rank", inputs)
    b = _hf(f"{_H}{hf}.lora_B.weight", outputs, "lora_rank")
    if column:
        return _row("replicated", f"{name}.a", a), _row("column", f"{name}.b", b)
    return _row("row", f"{name}.a", a), _row("replicated", f"{name}.b", b)


_ADAPTERS = {
    "q": _adapter("self_attention.linear_qkv", "q", "self_attn.q_proj", "q_size", "hidden_size"),
    "k": _adapter("self_attention.linear_qkv", "k", "self_attn.k_proj", "kv_size", "hidden_size"),
    "v": _adapter("self_attention.linear_qkv", "v", "self_attn.v_proj", "kv_size", "hidden_size"),
    "o": _adapter("self_attention.linear_proj", "o", "self_attn.o_proj", "hidden_size", "q_size"),
    "gate": _adapter("mlp.linear_fc1", "gate", "mlp.gate_proj", "ffn_size", "hidden_size"),
    "up": _adapter("mlp.linear_fc1", "up", "mlp.up_proj", "ffn_size", "hidden_size"),
    "down": _adapter("mlp.linear_fc2", "down", "mlp.down_proj", "hidden_size", "ffn_size"),
}
TARGETS = tuple(_ADAPTERS)
_UNTIED_OUTPUT = _row("vocab", "output_layer.weight", _HEAD)
# Megatron keeps a copy of a tied embedding on the last of several pipeline stages.
_TIED_OUTPUT = _row("vocab", "output_layer.weight", _EMBED, key="embedding.word_embeddings.weight", copy=True)
# fmt: on

TABLES: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        "llama": (*_COMMON, *_OUT, *_MLP),
        "qwen2": (*_COMMON, *_QKV_BIAS, *_OUT, *_MLP),
        "qwen3": (*_COMMON, *_QK_NORM, *_OUT, *_MLP),
        "qwen3_moe": (*_COMMON, *_QK_NORM, *_OUT, *_moe("mlp", "gate_proj", "up_proj", "down_proj")),
        "mixtral": (*_COMMON, *_OUT, *_moe("block_sparse_moe", "w1", "w3", "w2")),
    }
)


def rows(arch: Architecture) -> tuple[Row, ...]:
    """Return the architecture's table with its output layer."""
    return (*TABLES[arch.model_type], _TIED_OUTPUT if arch.tied else _UNTIED_OUTPUT)


def adapter_rows(arch: Architecture) -> tuple[Row, ...]:
    """Return A and B of every target; checkpoints of the model itself do not have them."""
    return tuple(
        row for target in (arch.adapters.targets if arch.adapters else ()) for row in _ADAPTERS[target]
    )


def adapter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every factor A and B, layer by layer."""
    return {
        row.at(layer).hf[0].name: row.hf[0].shape(arch)
        for layer in range(arch.num_layers)
        for row in adapter_rows(arch)
    }


def has_parameter(arch: Architecture, megatron_name: str) -> bool:
    """Return True if layers of ``arch`` have the parameter, such as ``self_attention.linear_qkv.bias``."""
    return any(f"{_M}{megatron_name}" in row.megatron for row in rows(arch))


def resolve(megatron_name: str, arch: Architecture, layer_offset: int = 0, expert_offset: int = 0) -> Row:
    """Return the row of a parameter named as in ``GPTModel.named_parameters()``.

    Megatron counts layers from 0 in each model chunk, and experts from 0 on each expert-parallel rank; the
    offsets are the numbers before them.
    """
    for row in (*rows(arch), *adapter_rows(arch)):
        for pattern in row.megatron:
            regex = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)")
            match = re.fullmatch(regex.replace(r"\{expert\}", r"(?P<expert>\d+)"), megatron_name)
            if match is None:
                continue
            numbers = match.groupdict()
            layer = int(numbers["layer"]) + layer_offset if "layer" in numbers else 0
            expert = int(numbers["expert"]) + expert_offset if "expert" in numbers else 0
            if not 0 <= layer < arch.num_layers:
                raise InputError(f"{megatron_name}: layer {layer}; the model has {arch.num_layers} layers")
            if "expert" in numbers and not 0 <= expert < arch.num_experts:
                raise InputError(f"{megatron_name}: expert {expert}; a layer has {arch.num_experts}")
            return replace(row.at(layer, expert), megatron=(megatron_name,))
    raise InputError(f"{megatron_name} corresponds to no Hugging Face tensor of a {arch.model_type} model")


def expected_hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in a checkpoint of this architecture, layer by layer."""
    return {
        tensor.name: tensor.shape(arch)
        for row, layer, expert in whole_model(arch)
        for tensor in row.at(layer, expert).hf
    }


def whole_model(arch: Architecture) -> Iterator[tuple[Row, int, int]]:
    """Yield the row, layer and expert of every parameter, in the order of the forward pass."""
    table = [row for row in rows(arch) if not row.copy]
    embedding, *others = (row for row in table if not row.in_layer)
    yield embedding, 0, 0
    for layer in range(arch.num_layers):
        for row in table:
            if row.in_layer:
                for expert in range(arch.num_experts if row.in_expert else 1):
                    yield row, layer, expert
    for row in others:
        yield row, 0, 0


def tied_copies(arch: Architecture) -> dict[str, str]:
    """Duplicates that a tied checkpoint may contain (Qwen3-0.6B does) → the tensor that they must equal."""
    return {_HEAD.name: _EMBED.name} if arch.tied else {}


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
        case "qkv" | "gate_up":
            rows = first[0] + sum(shape[0] for shape in others)
            return (rows // tp_size, *first[1:])


def shard_slices(row: Row, arch: Architecture, tp_rank: int, tp_size: int, padded_vocab: int) -> list[Slices]:
    """Return the part of each Hugging Face tensor of ``row`` that one rank holds.

    Heads of a query group are adjacent in ``q_proj``, so a range of query groups is a range of rows.
    """
    check_tensor_parallel(arch, tp_size, padded_vocab)
    parts = []
    for tensor in row.hf:
        shape = tensor.shape(arch)
        part = [slice(0, size) for size in shape]
        if row.layout != "replicated":
            dim = 1 if row.layout == "row" else 0
            step = (padded_vocab if row.layout == "vocab" else shape[dim]) // tp_size
            # Padding of the vocabulary is not read.
            part[dim] = slice(min(tp_rank * step, shape[dim]), min((tp_rank + 1) * step, shape[dim]))
        parts.append(tuple(part))
    return parts


def to_megatron_shard(
    row: Row, parts: Sequence[Tensor], arch: Architecture, shape: tuple[int, ...]
) -> Tensor:
    """Combine the parts that :func:`shard_slices` selects into one rank's parameter of the given shape."""
    match row.layout:
        case "replicated" | "row" | "column":
            (shard,) = parts
        case "gate_up":
            shard = torch.cat(list(parts))
        case "qkv":
            groups = parts[1].shape[0] // arch.head_dim
            shard = torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        case "vocab":
            (part,) = parts
            shard = part
            if padding := shape[0] - part.shape[0]:
                shard = torch.cat([part, part.new_zeros(padding, *shape[1:])])
    if tuple(shard.shape) != shape:
        raise InputError(f"{row.megatron[0]}: the parts form {tuple(shard.shape)}; the shard must be {shape}")
    return shard


def from_megatron_shards(row: Row, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    """Convert the shards of all tensor-parallel ranks, in rank order, to the tensors of ``row``."""
    tp_size = len(shards)
    vocab_rows = shards[0].shape[0] if row.layout == "vocab" else arch.vocab_size  # unused otherwise
    padded_vocab = tp_size * vocab_rows
    check_tensor_parallel(arch, tp_size, padded_vocab)
    expected = shard_shape(row, arch, tp_size, padded_vocab)
    for rank, shard in enumerate(shards):
        if tuple(shard.shape) != expected:
            got = f"shape {tuple(shard.shape)} on tensor-parallel rank {rank} of {tp_size}"
            raise InputError(f"{row.megatron[0]}: {got}; config.json requires {expected}")
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
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat(half) for half in zip(*halves, strict=True)]
        case "qkv":
            group = [arch.q_size // arch.num_kv_heads, arch.head_dim, arch.head_dim]
            groups = torch.cat([shard.view(-1, sum(group), *shard.shape[1:]) for shard in shards])
            return [part.flatten(0, 1) for part in torch.split(groups, group, dim=1)]
