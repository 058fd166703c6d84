"""Configs of published models are read as what they are; what one of them must not say is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from weights_helpers import refused

from hub_configs import CONFIGS
from megatron_fspo.weights import Architecture, Experts, read_architecture
from megatron_fspo.weights.architecture import LatentAttention, LinearAttention, Yarn
from megatron_fspo.weights.table import adapter_targets

LATENT: dict[str, Any] = {"kv_rank": 512, "rope_size": 64, "value_size": 128}
GLM = {"rotary_share": 0.5, "qkv_bias": True}
PATTERN: Any = ("linear", "linear", "linear", "full")
HYBRID: dict[str, Any] = {
    "rope_theta": 1e7, "rms_norm_eps": 1e-6, "head_dim": 256, "rotary_share": 0.25, "output_gate": True,
    "zero_centered_norms": True,
}  # fmt: skip
DELTA: dict[str, Any] = {"key_heads": 16, "key_size": 128, "value_size": 128, "conv": 4}
MIX: dict[str, Any] = {"ffn_size": 512, "normalize_top_k": True, "shared_ffn_size": 512}
# Fields beyond SIZES and USUAL; every other field has its default.
FOUND: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.1": {"window": 4096},
    "Phi-4": {"rope_theta": 250_000.0},
    "Granite-3.1-8B": {
        "rope_theta": 1e7, "tied": True, "attention_scale": 1 / 128, "embedding_scale": 12.0,
        "residual_scale": 0.22, "logits_divisor": 16.0,
    },
    "GLM-4-9B-0414": {**GLM, "rotary_interleaved": True},
    "Qwen1.5-MoE-A2.7B": {
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "qkv_bias": True,
        "experts": Experts(count=60, per_token=4, ffn_size=1408, normalize_top_k=False, shared_ffn_size=5632),
    },
    "GLM-4.5-Air": {
        **GLM, "rope_theta": 1e6, "unused_layers": 1,
        "experts": Experts(
            count=128, per_token=8, ffn_size=1408, normalize_top_k=True, dense_layers=1, shared_ffn_size=1408,
            sigmoid=True,
        ),
    },
    "Gemma-3-27B": {
        "rms_norm_eps": 1e-6, "tied": True, "rope_theta": 1e6, "rope_divisor": 8.0, "window": 1024,
        "window_rope_theta": 1e4, "zero_centered_norms": True, "gelu": True, "attention_scale": 168**-0.5,
        "layer_types": ((*["window"] * 5, "full") * 11)[:62], "prefix": "language_model.model.",
    },
    "OLMo-2-13B": {"rms_norm_eps": 1e-6, "rope_theta": 5e5},
    "OLMo-3-32B": {
        "rms_norm_eps": 1e-6, "rope_theta": 5e5, "window_rope_theta": 5e5, "window": 4096,
        "layer_types": (*["window"] * 3, "full") * 16,
        "yarn": Yarn(
            rotary_scaling_factor=8.0, original_max_position_embeddings=8192, beta_fast=32.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0,
        ),
    },
    "DeepSeek-V3": {
        "rms_norm_eps": 1e-6, "unused_layers": 1, "head_dim": 192, "fp8_block": (128, 128),
        "latent": LatentAttention(q_rank=1536, **LATENT),
        "yarn": Yarn(
            rotary_scaling_factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
        ),
        "experts": Experts(
            count=256, per_token=8, ffn_size=2048, normalize_top_k=True, dense_layers=3, shared_ffn_size=2048,
            sigmoid=True, scale=2.5, groups=8, group_top_k=4,
        ),
    },
    "Moonlight-16B-A3B": {
        "rope_theta": 5e4, "head_dim": 192, "latent": LatentAttention(q_rank=None, **LATENT),
        "experts": Experts(
            count=64, per_token=6, ffn_size=1408, normalize_top_k=True, dense_layers=1, shared_ffn_size=2816,
            sigmoid=True, scale=2.446,
        ),
    },
    "Qwen3-Next-80B-A3B": {
        **HYBRID, "layer_types": 12 * PATTERN, "linear": LinearAttention(value_heads=32, **DELTA),
        "experts": Experts(count=512, per_token=10, **MIX),
    },
    "Qwen3.5-27B": {
        **HYBRID, "layer_types": 16 * PATTERN, "linear": LinearAttention(value_heads=48, **DELTA),
        "prefix": "model.language_model.",
    },
    "Qwen3.5-35B-A3B": {
        **HYBRID, "layer_types": 10 * PATTERN, "linear": LinearAttention(value_heads=32, **DELTA),
        "prefix": "model.language_model.", "experts": Experts(count=256, per_token=8, **MIX),
    },
}  # fmt: skip
for model, count in {"gpt-oss-20b": 32, "gpt-oss-120b": 128}.items():
    FOUND[model] = {
        "rope_theta": 150_000.0, "head_dim": 64, "window": 128,
        "layer_types": ("window", "full") * (CONFIGS[model]["num_hidden_layers"] // 2),
        "yarn": Yarn(
            rotary_scaling_factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=0.0, correction_range_round_to_int=False,
        ),
        "experts": Experts(count=count, per_token=4, ffn_size=2880, normalize_top_k=True, clamp=7.0),
    }  # fmt: skip
SIZES = {
    "model_type": "model_type", "num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size",
    "ffn_size": "intermediate_size", "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
USUAL: dict[str, Any] = {
    "head_dim": 128, "tied": False, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "dtype": torch.bfloat16
}  # fmt: skip


def write(folder: Path, model: str, **changes: Any) -> None:
    config = {key: value for key, value in (CONFIGS[model] | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_published_config_is_read_as_what_it_is(tmp_path: Path, model: str) -> None:
    write(tmp_path, model)
    config = CONFIGS[model].get("text_config", CONFIGS[model])
    sizes = {name: config[key] for name, key in SIZES.items()}
    found, expected = read_architecture(tmp_path), Architecture(**{**USUAL, **sizes, **FOUND[model]})
    assert found == expected
    assert found.fp8_block == expected.fp8_block  # not compared otherwise


def test_the_embedding_factor_of_gemma_has_their_dtype(tmp_path: Path) -> None:
    write(tmp_path, "Gemma-3-27B")
    arch = read_architecture(tmp_path)
    assert arch.embedding_factor(torch.bfloat16) == 73.5
    assert abs(arch.embedding_factor(torch.float64) - 5376**0.5) < 1e-5


def test_kimi_k2_is_a_larger_deepseek_v3(tmp_path: Path) -> None:
    write(tmp_path, "DeepSeek-V3", model_type="kimi_k2", n_routed_experts=384, n_group=1, topk_group=1)
    arch = read_architecture(tmp_path)
    assert (arch.model_type, arch.num_experts) == ("deepseek_v3", 384)


YARN = CONFIGS["DeepSeek-V3"]["rope_scaling"]
LLAMA3 = {
    "type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
OLMO_YARN = CONFIGS["OLMo-3-32B"]["rope_scaling"]
GEMMA: dict[str, Any] = {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "use_bidirectional_attention": True,
    "hidden_activation": "gelu", "query_pre_attn_scalar": 0, "sliding_window": ..., "attention_bias": True,
    "sliding_window_pattern": 0, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
}  # fmt: skip


def gemma(**changes: Any) -> dict[str, Any]:
    text = CONFIGS["Gemma-3-27B"]["text_config"] | changes
    return {key: value for key, value in text.items() if value is not ...}


# Model, a key's value that changes what it computes (... where it is missing), and the key that is named.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("DeepSeek-V3", {key: value}, key)
        for key, values in {
            "scoring_func": ["softmax"], "topk_method": ["greedy", "group_limited_greedy"],
            "moe_layer_freq": [2, [0, 1]], "n_group": [3, 256, "8"], "n_shared_experts": ["1", -1],
            "first_k_dense_replace": [61, -1, 1.0, True], "n_routed_experts": [0, None],
            "num_experts_per_tok": [257], "norm_topk_prob": [None, 1], "routed_scaling_factor": [-1.0, "2.5"],
            "rope_interleave": [False], "num_key_value_heads": [8], "qk_head_dim": [128], "head_dim": [128],
            "kv_lora_rank": [None, 0], "q_lora_rank": [0], "attention_bias": [True],
            "num_nextn_predict_layers": ["1", -1, True], "partial_rotary_factor": [0.5],
            "layer_types": [["sliding_attention"]],
        }.items()
        for value in values
    ),
    ("DeepSeek-V3", {"topk_group": 9}, "n_group"),
    *(
        ("DeepSeek-V3", {"rope_scaling": YARN | change}, key)
        for change, key in [
            ({"type": "longrope"}, "rope_scaling"),
            (LLAMA3, "rope_scaling"),
            ({"attention_factor": 1.0}, "rope_scaling"),
            ({"truncate": False}, "rope_scaling"),
            ({"mscale": None}, "rope_scaling.mscale"),
            ({"original_max_position_embeddings": None}, "rope_scaling.original_max_position_embeddings"),
        ]
    ),
    ("DeepSeek-V3", {"rope_parameters": YARN | {"factor": 8}}, "rope_scaling"),
    *(("Gemma-3-27B", {"text_config": gemma(**{key: value})}, key) for key, value in GEMMA.items()),
    ("OLMo-3-32B", {"rope_scaling": OLMO_YARN | {"attention_factor": 1.0}}, "rope_scaling"),
    ("OLMo-3-32B", {"rope_theta": 1e6}, "rope_theta"),
    ("OLMo-3-32B", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
    ("OLMo-3-32B", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("OLMo-3-32B", {"sliding_window": None}, "sliding_window"),
    ("OLMo-2-13B", {"rope_scaling": OLMO_YARN}, "rope_scaling"),
    *((model, {"rope_scaling": YARN}, "rope_scaling") for model in ("Phi-4", "GLM-4.5-Air")),
    ("Mistral-7B-v0.1", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "rope_scaling"),
    *(
        ("gpt-oss-20b", {key: value, "torch_dtype": "bfloat16"}, key)
        for key, value in {
            "attention_bias": False, "swiglu_alpha": 1.5, "swiglu_limit": 0, "layer_types": [],
            "num_experts_per_tok": 33, "quantization_config": {"quant_method": "awq"},
        }.items()
    ),
    ("gpt-oss-20b", {"sliding_window": None}, "sliding_window"),
    *(("Phi-4", {"rope_scaling": {"type": kind}}, "rope_scaling") for kind in ("longrope", "su", "dynamic")),
    *(("Phi-4", {"partial_rotary_factor": share}, "partial_rotary_factor") for share in (0, 1.5, "1")),
    *(
        (model, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor")
        for model in ("Mistral-7B-v0.1", "Granite-3.1-8B")
    ),
    ("GLM-4.5-Air", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ("Mistral-7B-v0.1", {"layer_types": ["full_attention"]}, "layer_types"),
    ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window"),
    ("Mistral-7B-v0.1", {"attention_bias": True}, "attention_bias"),
    ("Granite-3.1-8B", {"mlp_bias": True}, "mlp_bias"),
    ("Granite-3.1-8B", {"residual_multiplier": 0}, "residual_multiplier"),
    ("Granite-3.1-8B", {"logits_scaling": "16"}, "logits_scaling"),
    *(
        ("Qwen3-Next-80B-A3B", {key: value}, key)
        for key, value in {
            "linear_num_value_heads": 24, "linear_num_key_heads": 0, "attn_output_gate": False,
            "linear_conv_kernel_dim": None, "full_attention_interval": 0, "mlp_only_layers": [0],
            "layer_types": ["sliding_attention"] * 48, "partial_rotary_factor": 2.0, "attention_bias": True,
            "use_sliding_window": True,
        }.items()
    ),
    ("Qwen3.5-35B-A3B", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("Qwen3.5-35B-A3B", {"text_config": None}, "text_config"),
    ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window"),
    ("Qwen1.5-MoE-A2.7B", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("Qwen1.5-MoE-A2.7B", {"decoder_sparse_step": 2}, "mlp_only_layers"),
    ("Qwen1.5-MoE-A2.7B", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "changes", "key"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, model: str, changes: dict[str, Any], key: str
) -> None:
    write(tmp_path, model, **changes)
    refused(lambda: read_architecture(tmp_path), tmp_path, f"{tmp_path / 'config.json'}: {key} ")


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("Mistral-7B-v0.1", "q k v o gate up down"),
        ("GLM-4-9B-0414", "q k v o down"),  # gate and up are one tensor of the files, and q, k and v of Phi's
        ("Phi-4", "o down"),
        ("GLM-4.5-Air", "q k v o"),
        ("Moonlight-16B-A3B", "o"),
        ("Gemma-3-27B", "q k v o gate up down"),
        ("OLMo-3-32B", "q k v o gate up down"),
        ("gpt-oss-20b", "q k v o"),
        ("Qwen3.5-27B", "q k v o gate up down"),
        ("Qwen3.5-35B-A3B", "q k v o"),
    ],
)
def test_adapters_are_of_matrices_that_the_files_name(tmp_path: Path, model: str, targets: str) -> None:
    write(tmp_path, model)
    assert adapter_targets(read_architecture(tmp_path)) == tuple(targets.split())
