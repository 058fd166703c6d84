"""Which Hugging Face tensors make which Megatron parameter: one table per architecture, used both ways.

A row is all the conversion knows of a parameter, so an architecture is a table and nothing else. The Megatron
side lists every name the parameter goes by: the local layer spec keeps the norms as modules of their own, the
Transformer Engine spec fuses them into the linear layer behind.

Layouts, with tp the tensor-parallel size:

========== ==================================================================================================
replicated the same on every rank
row        dimension 1 in tp equal parts
qkv        per query group: the group's query heads, its key head, its value head; tp equal runs of groups
gate_up    on each rank: its part of gate, then its part of up
vocab      dimension 0 in tp equal parts, after padding with zero rows to Megatron's vocabulary
========== ==================================================================================================

Nothing here is mutable: a tied model and an untied one can be converted in one process, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture

Layout = Literal["replicated", "row", "qkv", "gate_up", "vocab"]
Size = Literal[
    "vocab_size", "hidden_size", "q_size", "kv_size", "head_dim", "ffn_size", "num_experts", "expert_ffn_size"
]


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face checkpoint and its shape, in sizes of :class:`Architecture`."""

    name: str
    sizes: tuple[Size, ...]

    def shape(self, arch: Architecture) -> tuple[int, ...]:
        return tuple(getattr(arch, size) for size in self.sizes)


@dataclass(frozen=True)
class Row:
    """One Megatron parameter. In the table names hold ``{layer}`` and ``{expert}``, numbers within a rank's
    part of the model; :func:`resolve` fills them in."""

    layout: Layout
    megatron: tuple[str, ...]
    """The names it goes by; a resolved row has the one it was found under."""
    hf: tuple[HFTensor, ...]
    """What it is made of, in the order the layout wants."""
    key: str
    """Its name in a Megatron distributed checkpoint, where all layers (and experts) are one tensor."""
    copy: bool = False
    """A second copy of what another row owns: loaded, never exported."""

    @property
    def of_layer(self) -> bool:
        return "{layer}" in self.megatron[0]

    @property
    def of_expert(self) -> bool:
        """Experts are spread by expert parallel; tensor parallel does not cut them."""
        return ".experts." in self.key

    def at(self, layer: int, expert: int = 0) -> Row:
        """The row of one layer and expert, counted over the whole model."""
        hf = tuple(replace(t, name=t.name.format(layer=layer, expert=expert)) for t in self.hf)
        return replace(self, hf=hf)


def _row(layout: Layout, megatron: str, *hf: HFTensor, key: str | None = None, copy: bool = False) -> Row:
    """A checkpoint calls a parameter as Transformer Engine does, the last of the names, without the layer."""
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
# Experts one by one (local specification), or as one grouped product (Transformer Engine).
_MOE = (
    _row("replicated", f"{_M}pre_mlp_layernorm.weight",
         _hf(f"{_H}post_attention_layernorm.weight", "hidden_size")),
    _row("replicated", f"{_M}mlp.router.weight", _hf(f"{_H}mlp.gate.weight", "num_experts", "hidden_size")),
    _row("gate_up", f"{_M}mlp.experts.local_experts.{{expert}}.linear_fc1.weight"
         f" | {_M}mlp.experts.linear_fc1.weight{{expert}}",
         _hf(f"{_H}mlp.experts.{{expert}}.gate_proj.weight", "expert_ffn_size", "hidden_size"),
         _hf(f"{_H}mlp.experts.{{expert}}.up_proj.weight", "expert_ffn_size", "hidden_size"),
         key="decoder.layers.mlp.experts.experts.linear_fc1.weight"),
    _row("row", f"{_M}mlp.experts.local_experts.{{expert}}.linear_fc2.weight"
         f" | {_M}mlp.experts.linear_fc2.weight{{expert}}",
         _hf(f"{_H}mlp.experts.{{expert}}.down_proj.weight", "hidden_size", "expert_ffn_size"),
         key="decoder.layers.mlp.experts.experts.linear_fc2.weight"),
)
_UNTIED_OUTPUT = _row("vocab", "output_layer.weight", _HEAD)
# Megatron keeps a copy of a tied embedding on the last of several pipeline stages.
_TIED_OUTPUT = _row("vocab", "output_layer.weight", _EMBED, key="embedding.word_embeddings.weight", copy=True)
# fmt: on

TABLES: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        "llama": (*_COMMON, *_OUT, *_MLP),
        "qwen2": (*_COMMON, *_QKV_BIAS, *_OUT, *_MLP),
        "qwen3": (*_COMMON, *_QK_NORM, *_OUT, *_MLP),
        "qwen3_moe": (*_COMMON, *_QK_NORM, *_OUT, *_MOE),
    }
)


def rows(arch: Architecture) -> tuple[Row, ...]:
    """The table of this architecture, with the output layer it has."""
    return (*TABLES[arch.model_type], _TIED_OUTPUT if arch.tied else _UNTIED_OUTPUT)


def has_parameter(arch: Architecture, megatron_name: str) -> bool:
    """Whether layers of this architecture have the parameter, as ``self_attention.linear_qkv.bias``."""
    return any(f"{_M}{megatron_name}" in row.megatron for row in rows(arch))


def resolve(megatron_name: str, arch: Architecture, layer_offset: int = 0, expert_offset: int = 0) -> Row:
    """The row of a parameter, as ``GPTModel.named_parameters()`` calls it.

    Megatron counts layers from 0 in every model chunk, and experts on every expert-parallel rank; the offsets
    are the numbers of layers and experts before them.
    """
    for row in rows(arch):
        for pattern in row.megatron:
            regex = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)")
            match = re.fullmatch(regex.replace(r"\{expert\}", r"(?P<expert>\d+)"), megatron_name)
            if match is None:
                continue
            found = match.groupdict()
            layer = int(found["layer"]) + layer_offset if "layer" in found else 0
            expert = int(found["expert"]) + expert_offset if "expert" in found else 0
            if not 0 <= layer < arch.num_layers:
                raise InputError(f"{megatron_name}: layer {layer} of a model with {arch.num_layers} layers")
            if "expert" in found and not 0 <= expert < arch.num_experts:
                raise InputError(f"{megatron_name}: expert {expert} of {arch.num_experts} in a layer")
            return replace(row.at(layer, expert), megatron=(megatron_name,))
    raise InputError(f"{megatron_name}: no Hugging Face tensor is known for it in a {arch.model_type} model")


def expected_hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this architecture has, layer by layer."""
    return {
        tensor.name: tensor.shape(arch)
        for row, layer, expert in whole_model(arch)
        for tensor in row.at(layer, expert).hf
    }


def whole_model(arch: Architecture) -> Iterator[tuple[Row, int, int]]:
    """Row, layer and expert of every parameter of the model, in the order of the forward pass."""
    table = [row for row in rows(arch) if not row.copy]
    embedding, *others = (row for row in table if not row.of_layer)
    yield embedding, 0, 0
    for layer in range(arch.num_layers):
        for row in table:
            if row.of_layer:
                for expert in range(arch.num_experts if row.of_expert else 1):
                    yield row, layer, expert
    for row in others:
        yield row, 0, 0


def tied_copies(arch: Architecture) -> dict[str, str]:
    """Tensors a tied checkpoint may hold once more (Qwen3-0.6B does), each with the one it must equal."""
    return {_HEAD.name: _EMBED.name} if arch.tied else {}
