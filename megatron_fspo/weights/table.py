"""One table per architecture, which maps Hugging Face tensors to Megatron parameters in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.row import HFTensor, Row, ShardLayout, Size


def _row(layout: ShardLayout, megatron: str, *hf: HFTensor, key: str = "", **options: Any) -> Row:
    """``key`` defaults to the last name, Transformer Engine's, without the layer number."""
    names = tuple(megatron.split(" | "))
    return Row(layout, names, hf, key or names[-1].replace("{layer}.", ""), **options)


def _hf(name: str, *sizes: Size) -> HFTensor:
    return HFTensor(name, sizes)


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

# fmt: off
_EMBED = _hf("model.embed_tokens.weight", "vocab_size", "hidden_size")
_HEAD = _hf("lm_head.weight", "vocab_size", "hidden_size")

_ENDS = (
    _row("vocab", "embedding.word_embeddings.weight", _EMBED),
    _row("replicated", "decoder.final_layernorm.weight", _hf("model.norm.weight", "hidden_size")),
)


def _before(linear: str) -> Row:
    """The norm before attention, whose first product is ``linear``."""
    return _row("replicated", f"{_M}input_layernorm.weight | {_M}self_attention.{linear}.layer_norm_weight",
                _hf(f"{_H}input_layernorm.weight", "hidden_size"))


def _qkv(kind: str, *inputs: Size, fused: bool = False, **options: Any) -> Row:
    """Projections of query, key and value: three tensors, or one."""
    q, k, v = ["qkv_proj"] * 3 if fused else ["q_proj", "k_proj", "v_proj"]
    return _row("qkv", f"{_M}self_attention.linear_qkv.{kind}",
                _hf(f"{_H}self_attn.{q}.{kind}", "q_rows", *inputs),
                _hf(f"{_H}self_attn.{k}.{kind}", "kv_size", *inputs),
                _hf(f"{_H}self_attn.{v}.{kind}", "kv_size", *inputs), **options)


_OUT = _row("row", f"{_M}self_attention.linear_proj.weight",
            _hf(f"{_H}self_attn.o_proj.weight", "hidden_size", "value_size"))
_BIAS = _qkv("bias")
_OPTIONAL_BIAS = replace(_BIAS, when=attrgetter("qkv_bias"))
_QK_NORM = tuple(
    _row("replicated", f"{_M}self_attention.{one}_layernorm.weight",
         _hf(f"{_H}self_attn.{one}_norm.weight", "head_dim"))
    for one in "qk"
)
_PROJECTION_NORMS = (
    _row("column", f"{_M}self_attention.q_layernorm.weight", _hf(f"{_H}self_attn.q_norm.weight", "q_size")),
    _row("column", f"{_M}self_attention.k_layernorm.weight", _hf(f"{_H}self_attn.k_norm.weight", "kv_size")),
)
_OPTIONAL_QK_NORM = tuple(replace(row, when=attrgetter("qk_norm")) for row in _QK_NORM)
_ATTENTION = (*_ENDS, _before("linear_qkv"), _qkv("weight", "hidden_size"), _OUT)
_LOW_RANK: tuple[tuple[bool, str, str, tuple[Size, ...], Callable[[Architecture], object]], ...] = (
    (True, "q_down_proj", "q_a_proj", ("latent.q_rank", "hidden_size"), attrgetter("latent.q_rank")),
    (False, "q_up_proj", "q_b_proj", ("q_size", "latent.q_rank"), attrgetter("latent.q_rank")),
    (False, "q_proj", "q_proj", ("q_size", "hidden_size"), lambda a: a.latent and not a.latent.q_rank),
    (True, "kv_down_proj", "kv_a_proj_with_mqa", ("latent.kv_down_size", "hidden_size"), bool),
    (False, "kv_up_proj", "kv_b_proj", ("kv_up_size", "latent.kv_rank"), bool),
)
_RANKS: tuple[tuple[str, Size], ...] = (("q", "latent.q_rank"), ("kv", "latent.kv_rank"))
_LATENT = (
    *_ENDS,
    _row("replicated", f"{_M}input_layernorm.weight", _hf(f"{_H}input_layernorm.weight", "hidden_size")),
    *(
        _row("replicated" if down else "column", f"{_M}self_attention.linear_{megatron}.weight",
             _hf(f"{_H}self_attn.{hf}.weight", *sizes), when=when)
        for down, megatron, hf, sizes, when in _LOW_RANK
    ),
    *(
        _row("replicated", f"{_M}self_attention.{one}_layernorm.weight"
             f" | {_M}self_attention.linear_{one}_up_proj.layer_norm_weight",
             _hf(f"{_H}self_attn.{one}_a_layernorm.weight", size), when=attrgetter(size))
        for one, size in _RANKS
    ),
    _OUT,
)
_ATTENTION_FUSED = (*_ENDS, _before("linear_qkv"), _qkv("weight", "hidden_size", fused=True), _OUT)


def _gate_up(megatron: str, hf: str, size: Size, names: tuple[str, ...], **options: Any) -> tuple[Row, Row]:
    """The matrices of one MLP. In ``megatron``, # stands for fc1 and fc2; ``names`` are those of gate, up and
    down, where gate and up may be one tensor."""
    gate, up, down = names
    key = options.pop("key", "")
    return (
        _row("gate_up", megatron.replace("#", "fc1"), _hf(f"{hf}.{gate}.weight", size, "hidden_size"),
             _hf(f"{hf}.{up}.weight", size, "hidden_size"), key=key.replace("#", "fc1"), **options),
        _row("row", megatron.replace("#", "fc2"), _hf(f"{hf}.{down}.weight", "hidden_size", size),
             key=key.replace("#", "fc2"), **options),
    )


_NAMES = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gate_up_proj", "gate_up_proj", "down_proj")


def _mlp(names: tuple[str, ...] = _NAMES, norm: str = "post_attention_layernorm") -> tuple[Row, ...]:
    return (
        _row("replicated", f"{_M}pre_mlp_layernorm.weight | {_M}mlp.linear_fc1.layer_norm_weight",
             _hf(f"{_H}{norm}.weight", "hidden_size"), layers="dense"),
        *_gate_up(f"{_M}mlp.linear_#.weight", f"{_H}mlp", "ffn_size", names, layers="dense"),
    )


def _after(attention: str, mlp: str) -> tuple[Row, Row]:
    """Norms of what attention and MLP return."""
    return (
        _row("replicated", f"{_M}self_attn_bda.norm.weight", _hf(f"{_H}{attention}.weight", "hidden_size")),
        _row("replicated", f"{_M}mlp_bda.norm.weight", _hf(f"{_H}{mlp}.weight", "hidden_size")),
    )


def _moe(block: str, names: tuple[str, ...] = _NAMES) -> tuple[Row, ...]:
    """Experts as separate modules (local specification) or one grouped product (Transformer Engine)."""
    return (
        _row("replicated", f"{_M}pre_mlp_layernorm.weight",
             _hf(f"{_H}post_attention_layernorm.weight", "hidden_size"), layers="experts"),
        _row("replicated", f"{_M}mlp.router.weight",
             _hf(f"{_H}{block}.gate.weight", "num_experts", "hidden_size"), layers="experts"),
        _row("replicated", f"{_M}mlp.router.expert_bias",
             _hf(f"{_H}{block}.gate.e_score_correction_bias", "num_experts"), layers="experts",
             when=attrgetter("experts.sigmoid")),
        *_gate_up(f"{_M}mlp.experts.local_experts.{{expert}}.linear_#.weight"
                  f" | {_M}mlp.experts.linear_#.weight{{expert}}",
                  f"{_H}{block}.experts.{{expert}}", "expert_ffn_size", names, layers="experts",
                  key="decoder.layers.mlp.experts.experts.linear_#.weight"),
    )


def _shared(hf: str) -> tuple[Row, ...]:
    """The expert that every token uses."""
    return _gate_up(f"{_M}mlp.shared_experts.linear_#.weight", f"{_H}mlp.{hf}", "shared_ffn_size", _NAMES,
                    layers="experts", when=attrgetter("shared_ffn_size"))


def _fused_experts() -> tuple[Row, ...]:
    """Experts with biases (gpt-oss), each tensor of which is one of all experts, and inputs are rows."""
    wide: Size = "expert_gate_up_size"
    parts: tuple[tuple[ShardLayout, str, str, tuple[Size, ...]], ...] = (
        ("in_turn", "linear_fc1.weight", "gate_up_proj", ("hidden_size", wide)),
        ("in_turn", "linear_fc1.bias", "gate_up_proj_bias", (wide,)),
        ("transposed", "linear_fc2.weight", "down_proj", ("expert_ffn_size", "hidden_size")),
        ("replicated", "linear_fc2.bias", "down_proj_bias", ("hidden_size",)),
    )
    return (
        _row("replicated", f"{_M}pre_mlp_layernorm.weight",
             _hf(f"{_H}post_attention_layernorm.weight", "hidden_size")),
        _row("replicated", f"{_M}mlp.router.weight",
             _hf(f"{_H}mlp.router.weight", "num_experts", "hidden_size")),
        _row("replicated", f"{_M}mlp.router.bias", _hf(f"{_H}mlp.router.bias", "num_experts")),
        *(
            _row(layout, f"{_M}mlp.experts.local_experts.{{expert}}.{megatron}"
                 f" | {_M}mlp.experts.{megatron}{{expert}}", _hf(f"{_H}mlp.experts.{hf}", *sizes),
                 key=f"decoder.layers.mlp.experts.experts.{megatron}", stacked=True)
            for layout, megatron, hf, sizes in parts
        ),
    )


_GATED_SHARED = (
    *_shared("shared_expert"),
    _row("replicated", f"{_M}mlp.shared_experts.gate_weight",
         _hf(f"{_H}mlp.shared_expert_gate.weight", "one", "hidden_size")),
)
_A, _L = f"{_M}self_attention.", f"{_H}linear_attn."
_MIXED: tuple[Size, Size, Size] = ("linear.keys", "linear.keys", "linear.values")
_HYBRID = (
    *_ENDS,
    *(replace(row, layers="softmax")
      for row in (_before("linear_qkv"), _qkv("weight", "hidden_size"), *_QK_NORM, _OUT)),
    *(replace(row, layers="linear") for row in (
        _before("in_proj"),
        _row("qkv", f"{_A}conv_weight",
             *(_hf(f"{_L}conv1d.weight", size, "one", "linear.conv") for size in _MIXED)),
        *(_row("column", f"{_A}{name}", _hf(f"{_L}{name}", "linear.value_heads"))
          for name in ("A_log", "dt_bias")),
        _row("replicated", f"{_A}out_norm.weight", _hf(f"{_L}norm.weight", "linear.value_size")),
        _row("row", f"{_A}out_proj.weight", _hf(f"{_L}out_proj.weight", "hidden_size", "linear.values")),
    )),
)


def _in_proj(*parts: tuple[str, Size]) -> Row:
    """The projections of a gated delta net."""
    return _row("qkv", f"{_A}in_proj.weight",
                *(_hf(f"{_L}in_proj_{name}.weight", size, "hidden_size") for name, size in parts),
                layers="linear")


_IN_PROJ = _in_proj(*(("qkv", size) for size in _MIXED), ("z", "linear.values"),
                    ("b", "linear.value_heads"), ("a", "linear.value_heads"))


def _adapter(linear: str, target: str, hf: str, outputs: Size, inputs: Size) -> tuple[Row, Row]:
    """Return A and B of a target in a linear layer, with PEFT's tensor names without its prefix."""
    name, column = f"{_M}{linear}.adapters.{target}", linear.endswith(("qkv", "fc1"))
    a = _hf(f"{_H}{hf}.lora_A.weight", "lora_rank", inputs)
    b = _hf(f"{_H}{hf}.lora_B.weight", outputs, "lora_rank")
    if column:
        return _row("replicated", f"{name}.a", a), _row("column", f"{name}.b", b)
    return _row("row", f"{name}.a", a), _row("replicated", f"{name}.b", b)


_ADAPTERS = {
    "q": _adapter("self_attention.linear_qkv", "q", "self_attn.q_proj", "q_rows", "hidden_size"),
    "k": _adapter("self_attention.linear_qkv", "k", "self_attn.k_proj", "kv_size", "hidden_size"),
    "v": _adapter("self_attention.linear_qkv", "v", "self_attn.v_proj", "kv_size", "hidden_size"),
    "o": _adapter("self_attention.linear_proj", "o", "self_attn.o_proj", "hidden_size", "value_size"),
    "gate": _adapter("mlp.linear_fc1", "gate", "mlp.gate_proj", "ffn_size", "hidden_size"),
    "up": _adapter("mlp.linear_fc1", "up", "mlp.up_proj", "ffn_size", "hidden_size"),
    "down": _adapter("mlp.linear_fc2", "down", "mlp.down_proj", "hidden_size", "ffn_size"),
}
TARGETS = tuple(_ADAPTERS)
_UNTIED_OUTPUT = _row("vocab", "output_layer.weight", _HEAD)
# Megatron keeps a copy of a tied embedding on the last of several pipeline stages.
_TIED_OUTPUT = _row("vocab", "output_layer.weight", _EMBED, key="embedding.word_embeddings.weight", copy=True)

TABLES: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "granite"), (*_ATTENTION, *_mlp())),
        "qwen2": (*_ATTENTION, _BIAS, *_mlp()),
        "qwen3": (*_ATTENTION, *_QK_NORM, *_mlp()),
        "phi3": (*_ATTENTION_FUSED, *_mlp(_FUSED)),
        "glm4": (
            *_ATTENTION, _OPTIONAL_BIAS, *_mlp(_FUSED),
            *_after("post_self_attn_layernorm", "post_mlp_layernorm"),
        ),
        "gemma3_text": (
            *_ATTENTION, *_QK_NORM, *_mlp(norm="pre_feedforward_layernorm"),
            *_after("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        **dict.fromkeys(("olmo2", "olmo3"), (
            *_ENDS, _qkv("weight", "hidden_size"), _OUT, *_PROJECTION_NORMS, *_mlp()[1:],
            *_after("post_attention_layernorm", "post_feedforward_layernorm"),
        )),
        "qwen3_moe": (*_ATTENTION, *_QK_NORM, *_moe("mlp")),
        "mixtral": (*_ATTENTION, *_moe("block_sparse_moe", ("w1", "w3", "w2"))),
        "qwen2_moe": (*_ATTENTION, _OPTIONAL_BIAS, *_moe("mlp"), *_GATED_SHARED),
        "glm4_moe": (*_ATTENTION, _OPTIONAL_BIAS, *_OPTIONAL_QK_NORM, *_mlp(), *_moe("mlp"),
                     *_shared("shared_experts")),
        "deepseek_v3": (*_LATENT, *_mlp(), *_moe("mlp"), *_shared("shared_experts")),
        "gpt_oss": (
            *_ATTENTION, _BIAS,
            _row("replicated", f"{_M}self_attention.linear_proj.bias",
                 _hf(f"{_H}self_attn.o_proj.bias", "hidden_size")),
            _row("column", f"{_M}self_attention.core_attention.softmax_offset",
                 _hf(f"{_H}self_attn.sinks", "num_heads")),
            *_fused_experts(),
        ),
        # Its two tensors have the groups of heads that the others' six are sorted into.
        "qwen3_next": (
            *_HYBRID, _in_proj(("qkvz", "linear.qkvz"), ("ba", "linear.ba")), *_moe("mlp"), *_GATED_SHARED
        ),
        "qwen3_5_text": (*_HYBRID, _IN_PROJ, *_mlp()),
        "qwen3_5_moe_text": (*_HYBRID, _IN_PROJ, *_moe("mlp"), *_GATED_SHARED),
    }
)
# fmt: on


@lru_cache(maxsize=64)
def rows(arch: Architecture) -> tuple[Row, ...]:
    """Return the architecture's table with its output layer."""
    table = (row for row in TABLES[arch.model_type] if row.when(arch))
    return _prefixed(arch, (*table, _TIED_OUTPUT if arch.tied else _UNTIED_OUTPUT))


def _prefixed(arch: Architecture, table: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows with the names that the text model's tensors have in the files."""
    if arch.prefix == "model.":
        return tuple(table)
    return tuple(
        replace(row, hf=tuple(replace(t, name=re.sub(r"^model\.", arch.prefix, t.name)) for t in row.hf))
        for row in table
    )


def adapter_targets(arch: Architecture) -> tuple[str, ...]:
    """Return the targets whose matrix is a tensor of its own in the files, in every layer or in all with
    softmax attention. PEFT's names for fused matrices, and for those of latent attention, are others."""
    matrices = {
        (row.megatron[0], tensor.name)
        for row in rows(replace(arch, prefix="model."))
        if row.layers == "softmax" or all(row.is_in(arch, layer) for layer in range(arch.num_layers))
        for tensor in row.hf
    }
    adapted = {
        target: (a.megatron[0].partition(".adapters.")[0], a.hf[0].name.replace(".lora_A", ""))
        for target, (a, _) in _ADAPTERS.items()
    }
    return tuple(target for target, (linear, hf) in adapted.items() if (f"{linear}.weight", hf) in matrices)


def adapter_rows(arch: Architecture) -> tuple[Row, ...]:
    """Return A and B of every target; checkpoints of the model itself do not have them."""
    targets = arch.adapters.targets if arch.adapters else ()
    table = (row for target in targets for row in _ADAPTERS[target])
    if arch.linear is not None:
        table = (replace(row, layers="softmax") if ".self_attn." in row.hf[0].name else row for row in table)
    return _prefixed(arch, table)


def adapter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every factor A and B, layer by layer."""
    return {
        row.at(layer).hf[0].name: row.hf[0].shape(arch)
        for layer in range(arch.num_layers)
        for row in adapter_rows(arch)
        if row.is_in(arch, layer)
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
            if not row.is_in(arch, layer):
                continue
            if "expert" in numbers and not 0 <= expert < arch.num_experts:
                raise InputError(f"{megatron_name}: expert {expert}; a layer has {arch.num_experts}")
            return replace(row.at(layer, expert), megatron=(megatron_name,))
    raise InputError(f"{megatron_name} corresponds to no Hugging Face tensor of a {arch.model_type} model")


def expected_hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in a checkpoint of this architecture, layer by layer."""
    return {
        name: shape
        for row, layer, expert in whole_model(arch)
        for name, shape in row.at(layer, expert).files(arch).items()
    }


def whole_model(arch: Architecture) -> Iterator[tuple[Row, int, int]]:
    """Yield the row, layer and expert of every parameter, in the order of the forward pass."""
    table = [row for row in rows(arch) if not row.copy]
    embedding, *others = (row for row in table if not row.in_layer)
    yield embedding, 0, 0
    for layer in range(arch.num_layers):
        for row in table:
            if row.in_layer and row.is_in(arch, layer):
                for expert in range(arch.num_experts if row.in_expert else 1):
                    yield row, layer, expert
    for row in others:
        yield row, 0, 0


def is_unused(name: str, arch: Architecture) -> bool:
    """Return True if a tensor of the files belongs to a layer that predicts further tokens (MTP)."""
    if arch.linear is not None and name.startswith("mtp."):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - arch.num_layers < arch.unused_layers


def is_passed(name: str, arch: Architecture) -> bool:
    """Return True if a tensor of the files is not the text model's, and exports have it as it is."""
    text = (arch.prefix, _HEAD.name, "mtp.")
    return arch.prefix != "model." and not name.startswith(text)


def tied_copies(arch: Architecture) -> dict[str, str]:
    """Duplicates that a tied checkpoint may contain (Qwen3-0.6B does) → the tensor that they must equal."""
    return {_HEAD.name: f"{arch.prefix}embed_tokens.weight"} if arch.tied else {}
