"""Read a Hugging Face ``config.json`` as an :class:`Architecture`.

A key that changes what a model computes is read, or refused with an ``InputError`` if Megatron would compute
it differently from transformers (other biases, other kinds of RoPE, layers that differ).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.weights.architecture import (
    Architecture,
    Experts,
    LatentAttention,
    LayerType,
    LinearAttention,
)
from megatron_fspo.weights.config_file import ConfigFile
from megatron_fspo.weights.rope import read_rope
from megatron_fspo.weights.table import TABLES

SUPPORTED = (*TABLES,)
MULTIMODAL = {
    "gemma3": ("gemma3_text", "language_model.model."),
    "qwen3_5": ("qwen3_5_text", "model.language_model."),
    "qwen3_5_moe": ("qwen3_5_moe_text", "model.language_model."),
}
"""Multimodal model → the family of its text model, ``text_config``, and the prefix of that's names."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WITH_WINDOW = ("mistral", "mixtral", "phi3")
_GLM = ("glm4", "glm4_moe")
_LAYER_TYPES: dict[str, LayerType] = {
    "full_attention": "full", "sliding_attention": "window", "linear_attention": "linear"
}  # fmt: skip
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_MIXED = {
    "gemma3_text": ("sliding_attention", 6, "sliding_window_pattern"),
    "olmo3": ("sliding_attention", 4, ""),
    "gpt_oss": ("sliding_attention", 2, ""),
    **dict.fromkeys(_HYBRID, ("linear_attention", 4, "full_attention_interval")),
}
"""Family whose layers differ → what most attend to; without the key ``layer_types``, every how many layers
one has full attention instead, and the key that says another number."""
_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_ONLY: dict[str, dict[str, Any]] = {
    "gpt_oss": {"attention_bias": True, "swiglu_alpha": 1.702, "norm_topk_prob": True},
    "mixtral": {"norm_topk_prob": True},
    "qwen3_5_moe_text": {"norm_topk_prob": True},
    "glm4_moe": _ROUTER,  # the keys of DeepSeek-V3's own code, which transformers leaves out
    "deepseek_v3": _ROUTER | {"rope_interleave": True},
}
"""Family → keys that must have this value, if they are there."""
_UNSET = (
    "mlp_bias", "use_sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
    "use_bidirectional_attention",
)  # fmt: skip
_GEMMA = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6,
}  # fmt: skip
"""Keys that files of Gemma 3 leave out."""
_GRANITE = {
    "attention_scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


def read_architecture(checkpoint_dir: str | Path) -> Architecture:
    """Read the architecture of a checkpoint folder; raises ``InputError`` if the model is not supported."""
    config = ConfigFile(Path(checkpoint_dir) / "config.json")
    family, prefix = config.required("model_type", str), "model."
    if family in MULTIMODAL:
        config = config.part("text_config")
        family, prefix = MULTIMODAL[family]
    family = "deepseek_v3" if family == "kimi_k2" else family  # the same model with more experts
    if family not in SUPPORTED:
        legal = ", ".join((*SUPPORTED, *MULTIMODAL))
        problem = f"is {family!r}; supported: {legal}; docs/adding_a_model.md adds one"
        raise config.error("model_type", problem)
    gemma = family == "gemma3_text"
    for key, value in _GEMMA.items() if gemma else ():
        config.values.setdefault(key, value)
    _refuse_unsupported(config, family)
    latent = _latent(config) if family == "deepseek_v3" else None
    scaled = _GRANITE if family == "granite" else {}
    factors: dict[str, Any] = {name: config.factor(key) for name, key in scaled.items()}
    if gemma:
        factors["attention_scale"] = config.factor("query_pre_attn_scalar") ** -0.5
    layer_types, window = _layers(config, family)
    arch = Architecture(
        model_type=family,
        num_layers=config.size("num_hidden_layers", most=10_000),
        hidden_size=config.size("hidden_size"),
        num_heads=config.size("num_attention_heads"),
        num_kv_heads=config.size("num_attention_heads" if latent else "num_key_value_heads"),
        head_dim=_head_dim(config, latent),
        ffn_size=0 if family == "qwen3_5_moe_text" else config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        tied=config.required("tie_word_embeddings", bool),
        rms_norm_eps=config.positive("rms_norm_eps", config.optional("rms_norm_eps")),
        **read_rope(config, family),
        rotary_interleaved=family == "glm4",
        layer_types=layer_types,
        window=window,
        zero_centered_norms=gemma or family in _HYBRID,
        gelu=gemma,
        output_gate=family in _HYBRID,
        linear=_linear(config) if family in _HYBRID else None,
        prefix=prefix,
        **factors,
        qkv_bias=(family in _GLM and config.optional("attention_bias") is True)
        or (family == "qwen2_moe" and config.optional("qkv_bias") is not False),
        qk_norm=family == "glm4_moe" and config.optional("use_qk_norm") is True,
        latent=latent,
        experts=_experts(config, family),
        max_position_embeddings=config.size("max_position_embeddings"),
        unused_layers=_unused_layers(config),
        dtype=_dtype(config),
        fp8_block=_fp8_block(config),
    )
    if arch.num_heads % arch.num_kv_heads:
        problem = f"is {arch.num_kv_heads}, which does not divide num_attention_heads {arch.num_heads}"
        raise config.error("num_key_value_heads", problem)
    return arch


def _fp8_block(config: ConfigFile) -> tuple[int, int] | None:
    quantization = config.optional("quantization_config")
    if quantization is None or (isinstance(quantization, dict) and _is_mxfp4(config)):
        return None
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if (
        not isinstance(block, list)
        or quantization.get("quant_method") != "fp8"
        or [type(size) for size in block] != [int, int]
        or min(block) < 1
    ):
        problem = "must be FP8 with a weight_block_size of two sizes, or absent"
        raise config.error("quantization_config", problem)
    return block[0], block[1]


def _is_mxfp4(config: ConfigFile) -> bool:
    """Return True for gpt-oss's own files, whose experts have 4 bits a value."""
    quantization = config.optional("quantization_config")
    of_family = config.optional("model_type") == "gpt_oss" and isinstance(quantization, dict)
    return of_family and quantization.get("quant_method") == "mxfp4"


def _refuse_unsupported(config: ConfigFile, family: str) -> None:
    for key, value in ({"attn_output_gate": True} | _ONLY.get(family, {})).items():
        config.check(key, value)
    biases = () if family in (*_GLM, "gpt_oss") else ("attention_bias",)
    for key in (*biases, *_UNSET):
        if config.optional(key):
            raise config.error(key, f"is {config.values[key]!r:.50}, which {family} may not have here")
    gemma = family == "gemma3_text"
    name, legal = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    config.required(name, str)
    config.check(name, legal)


def _layers(config: ConfigFile, family: str) -> tuple[tuple[LayerType, ...], int | None]:
    """Read what each layer attends to, empty where all are alike, and the window, None without."""
    kinds, count = config.optional("layer_types"), config.size("num_hidden_layers")
    # Other families have the key of the window without using it.
    windowed = config.optional("sliding_window") is not None and family in _WITH_WINDOW
    most, every, key = _MIXED.get(family, ("sliding_attention" if windowed else "full_attention", 0, ""))
    legal = dict.fromkeys((most, "full_attention") if every else (most,))
    if kinds is None:
        every = config.size(key) if config.optional(key) is not None else every
        kinds = [most if layer % every else "full_attention" for layer in range(1, count + 1) if every]
    elif other := [kind for kind in config.required("layer_types", list) if kind not in legal]:
        raise config.error("layer_types", f"has {other[0]!r:.50}; {family} may have {' or '.join(legal)}")
    if not every:
        return (), config.size("sliding_window") if windowed else None
    if len(kinds) != count:
        raise config.error("layer_types", f"has {len(kinds)} entries; num_hidden_layers differs")
    window = config.size("sliding_window") if "sliding_attention" in kinds else None
    return tuple(_LAYER_TYPES[kind] for kind in kinds), window


def _head_dim(config: ConfigFile, latent: LatentAttention | None) -> int:
    """Read head_dim; models other than Qwen3 may omit it, and it is then hidden_size / heads."""
    if latent is not None:
        return config.size("qk_nope_head_dim") + latent.rope_size
    if config.optional("head_dim") is not None or config.values["model_type"].startswith("qwen3"):
        return config.size("head_dim")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise config.error("hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _unused_layers(config: ConfigFile) -> int:
    """Read the number of layers that predict further tokens; transformers 5 writes the second name."""
    keys = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if config.optional(key)]
    return config.size(keys[0], most=100) if keys else 0


def _latent(config: ConfigFile) -> LatentAttention:
    rope = config.size("qk_rope_head_dim")
    for key, only in {
        "num_key_value_heads": config.size("num_attention_heads"),
        "qk_head_dim": config.size("qk_nope_head_dim") + rope,
        "head_dim": rope,  # transformers 5 writes it so
    }.items():
        config.check(key, only)
    return LatentAttention(
        q_rank=None if config.optional("q_lora_rank") is None else config.size("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"),
        rope_size=rope,
        value_size=config.size("v_head_dim"),
    )


def _linear(config: ConfigFile) -> LinearAttention:
    linear = LinearAttention(
        key_heads=config.size("linear_num_key_heads"),
        value_heads=config.size("linear_num_value_heads"),
        key_size=config.size("linear_key_head_dim"),
        value_size=config.size("linear_value_head_dim"),
        conv=config.size("linear_conv_kernel_dim"),
    )
    if linear.value_heads % linear.key_heads:
        problem = f"is {linear.value_heads}, not a multiple of linear_num_key_heads {linear.key_heads}"
        raise config.error("linear_num_value_heads", problem)
    return linear


def _experts(config: ConfigFile, family: str) -> Experts | None:
    gated = family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")  # the shared expert
    if not gated and family not in ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"):
        return None
    if config.optional("decoder_sparse_step") not in (None, 1) or config.optional("mlp_only_layers"):
        raise config.error("mlp_only_layers", "or decoder_sparse_step: all layers must have experts")
    # Mixtral and transformers 5 write num_local_experts; Qwen3-MoE's files on the Hub have num_experts.
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    only, sigmoid = family in ("mixtral", "gpt_oss"), family in ("glm4_moe", "deepseek_v3")
    always = "norm_topk_prob" in _ONLY.get(family, ())
    experts = Experts(
        count=config.size(next((key for key in keys if key in config.values), keys[-1])),
        per_token=config.size("num_experts_per_tok"),
        ffn_size=config.size("intermediate_size" if only else "moe_intermediate_size"),
        normalize_top_k=always or config.required("norm_topk_prob", bool),
        shared_ffn_size=config.size("shared_expert_intermediate_size") if gated else 0,
        clamp=config.positive("swiglu_limit", config.values.get("swiglu_limit", 7.0))
        if family == "gpt_oss"
        else None,
    )
    if experts.per_token > experts.count:
        raise config.error("num_experts_per_tok", f"is {experts.per_token}; num_experts is {experts.count}")
    return _sigmoid_experts(config, experts) if sigmoid else experts


def _sigmoid_experts(config: ConfigFile, experts: Experts) -> Experts:
    """Add what DeepSeek-V3's routers have."""
    groups = config.size("n_group") if config.optional("n_group") else 1
    chosen = config.size("topk_group") if config.optional("topk_group") else 1
    if chosen > groups or experts.count % groups or (groups > 1 and experts.count < 2 * groups):
        raise config.error("n_group", f"is {groups}, topk_group {chosen}; the experts are {experts.count}")
    dense = config.optional("first_k_dense_replace") or 0
    if type(dense) is not int or not 0 <= dense < config.size("num_hidden_layers"):
        raise config.error("first_k_dense_replace", f"is {dense!r:.50}; it must be below num_hidden_layers")
    shared = config.optional("n_shared_experts")
    return replace(
        experts,
        dense_layers=dense,
        shared_ffn_size=experts.ffn_size * config.size("n_shared_experts") if shared else 0,
        sigmoid=True,
        scale=config.factor("routed_scaling_factor"),
        groups=groups,
        group_top_k=chosen,
    )


def _dtype(config: ConfigFile) -> torch.dtype:
    """Read the dtype: transformers 5 writes ``dtype``, transformers 4 ``torch_dtype``."""
    key = "torch_dtype" if config.optional("dtype") is None and "torch_dtype" in config.values else "dtype"
    if config.optional(key) is None and _is_mxfp4(config):
        return torch.bfloat16  # of its other tensors
    name = config.required(key, str)
    if name not in _DTYPES:
        raise config.error(key, f"is {name!r}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]
