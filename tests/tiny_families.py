"""Little models of every family, in transformers' keys: the only list. Checkpoints that train on make-sum."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launch import REPO

LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_DENSE = ("mistral", "phi3", "granite", "glm4", "gemma3_text", "olmo2", "olmo3")
NEW = (*_DENSE, "qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight", "gpt_oss", *LINEAR)
LETTERS = REPO / "examples/make_sum/checkpoint"
VOCAB = 1237  # a prime: every tensor-parallel size pads
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "vocab_size": 14, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 11, "eos_token_id": 12, "pad_token_id": 13, "initializer_range": 0.15,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_PARTIAL = {**_ROPE, "partial_rotary_factor": 0.5}
# With 16 dimensions a head, the longest of 8 wavelengths is beyond 8192 tokens, the next from 2048 to 8192.
_LLAMA3 = {
    **_ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {
    **_ROPE, "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
_SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LATENT = {
    **_SIGMOID, "num_experts_per_tok": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
_MIXED = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2}
_OLMO3 = {
    "rope_type": "yarn", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "attention_factor": 0.1 * math.log(8) + 1,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}  # fmt: skip
# As Qwen documents it for long contexts, and as in gpt-oss.
_LONG = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_UNROUNDED = {**_LONG, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "rope_parameters": _LLAMA3},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 20},
    "qwen3_yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": _LONG},
    "gpt_oss": {
        **_MIXED, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16,
        "rope_parameters": _UNROUNDED, "swiglu_limit": 1.0,
    },
    "qwen3_moe": {**_MOE, "norm_topk_prob": True},
    "moe_raw": {**_MOE, "model_type": "qwen3_moe", "tie_word_embeddings": True, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 40},
    "phi3": {"pad_token_id": 0, "rope_parameters": _PARTIAL},
    "granite": {
        "tie_word_embeddings": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.25, "logits_scaling": 8.0,
    },
    "glm4": {"head_dim": 16, "pad_token_id": 0, "attention_bias": True, "rope_parameters": _PARTIAL},
    "gemma3_text": {
        **_MIXED, "tie_word_embeddings": True, "head_dim": 16, "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": _ROPE,
        },
    },
    "olmo2": {},
    "olmo3": {
        **_MIXED,
        "rope_parameters": {
            "full_attention": _OLMO3, "sliding_attention": {**_ROPE, "rope_theta": 500_000.0},
        },
    },
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN},
    "moonlight": {**_LATENT, "model_type": "deepseek_v3", "q_lora_rank": None},
    "qwen3_next": {**_MOE, "shared_expert_intermediate_size": 48, **_LINEAR},
    "qwen3_5_text": {"tie_word_embeddings": True, **_LINEAR},
    "qwen3_5_moe_text": {**_MOE, "shared_expert_intermediate_size": 48, **_LINEAR},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 48},
    "glm4_moe": {
        **_SIGMOID, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_parameters": _PARTIAL,
    },
}  # fmt: skip


def config(family: str, sizes: Mapping[str, Any] = {}, **changes: Any) -> Any:
    """transformers' configuration of the family's little model; of ``sizes`` what the family has."""
    from transformers import AutoConfig

    keys = {"model_type": family, **_SIZES, "rope_parameters": _ROPE, **_OWN[family]}
    keys |= {key: size for key, size in sizes.items() if keys.get(key) is not None} | changes
    if "layer_types" in keys:
        keys["layer_types"] = (keys["layer_types"] * keys["num_hidden_layers"])[: keys["num_hidden_layers"]]
    if "kv_lora_rank" in keys:
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    return AutoConfig.for_model(**copy.deepcopy(keys))  # transformers writes into it


def biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of routers: a checkpoint holds them, and they are no parameters."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]


def write(family: str, folder: Path, **changes: Any) -> Path:
    """A float32 checkpoint of random weights: first layers dense where the family has such, a window that is
    shorter than the responses, and biases and sinks that matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(family))
    # transformers' tokenizer for hybrid families adds a token.
    sizes = _SMALL | ({"vocab_size": 15} if family in LINEAR else {}) | changes
    model = AutoModelForCausalLM.from_config(config(family, {"sliding_window": 12}, **sizes))
    with torch.no_grad():
        learned = [value for name, value in model.named_parameters() if name.endswith(("bias", "sinks"))]
        for bias in (*biases(model), *(learned if family == "gpt_oss" else ())):
            bias.copy_(torch.randn(bias.shape) * 0.3)
    model.float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(LETTERS / name, folder / name)
    return folder
