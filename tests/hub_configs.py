"""``config.json`` of published models as they are on the Hub, in the style of transformers 4: what counts."""

from __future__ import annotations

from typing import Any


def _config(model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, **more: Any) -> dict:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0,
        "transformers_version": "4.46.3", **more,
    }  # fmt: skip


def _deepseek(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> dict:
    return _config(
        "deepseek_v3", layers, hidden, ffn, heads, heads, attention_bias=False, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_layer_freq=1, norm_topk_prob=True,
        scoring_func="sigmoid", topk_method="noaux_tc", pretraining_tp=1, **more,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict:
    config = _config(
        "gpt_oss", layers, 2880, 2880, 64, 8, head_dim=64, rope_theta=150000, vocab_size=201088,
        max_position_embeddings=131072, initial_context_length=4096, num_local_experts=experts,
        num_experts_per_tok=4, experts_per_token=4, attention_bias=True, sliding_window=128, swiglu_limit=7.0,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2), output_router_logits=False,
        router_aux_loss_coef=0.9,
        rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    )  # fmt: skip
    return {key: value for key, value in config.items() if key != "torch_dtype"}  # they have none


def _hybrid(model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, **more: Any) -> dict:
    return _config(
        model_type, layers, hidden, ffn, heads, kv, rms_norm_eps=1e-6, rope_theta=10000000, head_dim=256,
        attention_bias=False, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_value_head_dim=128, max_position_embeddings=262144, **more,
    )  # fmt: skip


def _qwen3_5(tied: bool, text: dict[str, Any]) -> dict[str, Any]:
    rope = {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    text |= {
        "rope_parameters": rope, "attn_output_gate": True, "vocab_size": 248320, "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": tied,
    }  # fmt: skip
    outside = {"model_type": text["model_type"].removesuffix("_text"), "tie_word_embeddings": tied}
    return {**outside, "text_config": text, "vision_config": {}, "image_token_id": 248056}


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "Mistral-7B-v0.1": _config(
        "mistral", 32, 4096, 14336, 32, 8, sliding_window=4096, vocab_size=32000,
        max_position_embeddings=32768,
    ),
    "Phi-4": _config(
        "phi3", 40, 5120, 17920, 40, 10, rope_theta=250000, rope_scaling=None, sliding_window=None,
        vocab_size=100352, max_position_embeddings=16384, original_max_position_embeddings=16384,
        attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "Granite-3.1-8B": _config(
        "granite", 40, 4096, 12800, 32, 8, rope_theta=10000000.0, rope_scaling=None, vocab_size=49155,
        max_position_embeddings=131072, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=16.0,
    ),
    "GLM-4-9B-0414": _config(
        "glm4", 40, 4096, 13696, 32, 2, head_dim=128, attention_bias=True, partial_rotary_factor=0.5,
        vocab_size=151552, max_position_embeddings=32768, pad_token_id=151329,
    ),
    "Qwen1.5-MoE-A2.7B": _config(
        "qwen2_moe", 24, 2048, 5632, 16, 16, rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=151936,
        max_position_embeddings=8192, sliding_window=32768, use_sliding_window=False, max_window_layers=21,
        decoder_sparse_step=1, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        num_experts=60, num_experts_per_tok=4, norm_topk_prob=False, output_router_logits=False,
        router_aux_loss_coef=0.001,
    ),
    "GLM-4.5-Air": _config(
        "glm4_moe", 46, 4096, 10944, 96, 8, head_dim=128, attention_bias=True, use_qk_norm=False,
        partial_rotary_factor=0.5, rope_scaling=None, rope_theta=1000000, vocab_size=151552,
        max_position_embeddings=131072, moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, norm_topk_prob=True, n_group=1, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=1.0, num_nextn_predict_layers=1,
    ),
    "Gemma-3-27B": {  # the other keys of its text model are those that transformers assumes
        "model_type": "gemma3", "torch_dtype": "bfloat16", "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "head_dim": 128,
            "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168, "sliding_window": 1024, "vocab_size": 262208,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "max_position_embeddings": 131072,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    },
    "OLMo-2-13B": _config(
        "olmo2", 40, 5120, 13824, 40, 40, rms_norm_eps=1e-6, rope_theta=500000, rope_scaling=None,
        vocab_size=100352, max_position_embeddings=4096, attention_bias=False,
    ),
    "OLMo-3-32B": _config(
        "olmo3", 64, 5120, 27648, 40, 8, rms_norm_eps=1e-6, rope_theta=500000, vocab_size=100278,
        max_position_embeddings=65536, attention_bias=False, sliding_window=4096,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
        rope_scaling={
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    ),
    "DeepSeek-V3": _deepseek(
        61, 7168, 18432, 128, q_lora_rank=1536, rms_norm_eps=1e-6, vocab_size=129280,
        max_position_embeddings=163840, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5,
        num_nextn_predict_layers=1, ep_size=1,
        rope_scaling={
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        quantization_config={
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    ),
    "Moonlight-16B-A3B": _deepseek(
        27, 2048, 11264, 16, q_lora_rank=None, rope_theta=50000.0, vocab_size=163840,
        max_position_embeddings=8192, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.446,
        num_nextn_predict_layers=0, ep_size=1, seq_aux=True, aux_loss_alpha=0.001,
    ),
    "Qwen3-Next-80B-A3B": _hybrid(
        "qwen3_next", 48, 2048, 5120, 16, 2, linear_num_value_heads=32, partial_rotary_factor=0.25,
        rope_scaling=None, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True,
        vocab_size=151936, use_sliding_window=False,
    ),
    "Qwen3.5-27B": _qwen3_5(
        False, _hybrid("qwen3_5_text", 64, 5120, 17408, 24, 4, linear_num_value_heads=48)
    ),
    "Qwen3.5-35B-A3B": _qwen3_5(
        False,
        _hybrid(
            "qwen3_5_moe_text", 40, 2048, 0, 16, 2, linear_num_value_heads=32, mlp_only_layers=[],
            moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256,
            num_experts_per_tok=8,
        ),
    ),
}  # fmt: skip
"""Sizes are the published ones, written from memory: no file of theirs was loaded here."""
BILLIONS = {
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "Mistral-7B-v0.1": 7.24, "Phi-4": 14.7, "Granite-3.1-8B": 8.17, "GLM-4-9B-0414": 9.4,
    "Qwen1.5-MoE-A2.7B": 14.3, "GLM-4.5-Air": 106, "Gemma-3-27B": 27.0,
    "OLMo-2-13B": 13.7, "OLMo-3-32B": 32.2, "DeepSeek-V3": 671, "Moonlight-16B-A3B": 16,
    "Qwen3-Next-80B-A3B": 80, "Qwen3.5-27B": 27, "Qwen3.5-35B-A3B": 35,
}  # fmt: skip
"""Published numbers of parameters, without layers that predict further tokens."""
