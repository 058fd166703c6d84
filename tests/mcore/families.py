"""Random little checkpoints of every supported family, the sequences to score, and the layouts."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend import ENGINE, fitting, supported
from megatron_fspo.config import Parallel

VOCAB = 1237  # a prime: every tensor-parallel size pads
LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
DENSE = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "glm4", "gemma3", "olmo2", "olmo3"),
    LINEAR[1],
)
EXPERTS = (
    *("moe_normalised", "moe_raw", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight"),
    *LINEAR[::2],
)
FAMILIES = (*DENSE, *EXPERTS)
FEWER = ("mistral", "phi3", "granite", "qwen2_moe", "glm4_moe", "moonlight", "gemma3", "olmo2", "qwen3_next")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# With 16 dimensions a head, the longest of 8 wavelengths is beyond 8192 tokens, the next from 2048 to 8192.
_LLAMA3 = {
    **_ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_LATENT = {
    **_SIGMOID,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}
_YARN = {
    **_ROPE,
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_OLMO3 = {
    **{"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 8.0},
    **{"original_max_position_embeddings": 32, "attention_factor": 0.1 * math.log(8) + 1},
}
_OLMO3_WINDOW = {"rope_type": "default", "rope_theta": 500_000.0}
_MIXED = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Family → transformers' name of it, whether the head is the embedding, and sizes of its own.
_OWN: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("llama", False, {"head_dim": 16, "rope_parameters": _LLAMA3}),
    "qwen2": ("qwen2", False, {}),
    "qwen3": ("qwen3", True, {"head_dim": 20}),
    "moe_normalised": ("qwen3_moe", False, {**_MOE, "norm_topk_prob": True}),
    "mixtral": ("mixtral", False, {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    "moe_raw": ("qwen3_moe", True, {**_MOE, "norm_topk_prob": False}),
    "mistral": ("mistral", False, {"head_dim": 16, "sliding_window": 40}),
    "phi3": ("phi3", False, {"pad_token_id": 0, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "granite": (
        "granite",
        True,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
            "logits_scaling": 8.0,
        },
    ),
    "glm4": (
        "glm4",
        False,
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "attention_bias": True,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3": (
        "gemma3_text",
        True,
        {
            **_MIXED,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _ROPE,
            },
        },
    ),
    "olmo2": ("olmo2", False, {}),
    "olmo3": (
        "olmo3",
        False,
        {**_MIXED, "rope_parameters": {"full_attention": _OLMO3, "sliding_attention": _OLMO3_WINDOW}},
    ),
    "deepseek_v3": ("deepseek_v3", False, {**_LATENT, "rope_parameters": _YARN}),
    "moonlight": ("deepseek_v3", False, {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "qwen3_next": ("qwen3_next", False, {**_MOE, "shared_expert_intermediate_size": 48, **_LINEAR}),
    "qwen3_5": ("qwen3_5_text", True, _LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe_text", False, {**_MOE, "shared_expert_intermediate_size": 48, **_LINEAR}),
    "qwen2_moe": ("qwen2_moe", False, {**_MOE, "shared_expert_intermediate_size": 48}),
    "glm4_moe": (
        "glm4_moe",
        False,
        {
            **_SIGMOID,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
}

# World size → name → layout; `fits` says which families.
LAYOUTS = fitting(
    {
        1: {"tp1": Parallel()},
        2: supported(
            {
                "tp2": Parallel(tensor=2),
                "tp2.sp": Parallel(tensor=2, sequence=True),
                "pp2": Parallel(pipeline=2),
                "cp2": Parallel(context=2),
                "ep2": Parallel(expert=2),
            },
            but=("tp2", "tp2.sp", "pp2"),
        ),
        4: supported(
            {
                "tp4.sp": Parallel(tensor=4, sequence=True),
                "pp2.vpp2.dp2": Parallel(pipeline=2, virtual_pipeline=2),
                "tp2.sp.ep2": Parallel(tensor=2, sequence=True, expert=2),
                "pp2.cp2.ep2": Parallel(pipeline=2, context=2, expert=2),
            }
        ),
    }
)
# Layouts that score converted checkpoints, too. The largest world is enough, as it is the same code.
CONVERTED = [] if ENGINE else list(LAYOUTS[max(LAYOUTS)])
_MORE = {
    "tp4.sp": Parallel(tensor=4, sequence=True),
    "pp4": Parallel(pipeline=4),
    "pp2.ep2": Parallel(pipeline=2, expert=2),
}
# Layouts that load and save distributed checkpoints, all of as many ranks as there may be, 4 at most.
# What the first saves, all load.
CHECKPOINT_LAYOUTS = {
    name: layout
    for name, layout in {
        "tp2.sp.pp2": Parallel(tensor=2, sequence=True, pipeline=2),
        "single": Parallel(),
        **({} if ENGINE else _MORE),
        "tp2.sp.ep4": Parallel(tensor=2, sequence=True, expert=4),
    }.items()
    if max(layout.model_size, layout.expert) <= max(LAYOUTS)
}


def fits(family: str, parallel: Parallel) -> bool:
    """Whether the family can be spread like this. What others have shown of further tensor-parallel layouts,
    most families do not show again."""
    further = parallel.tensor == 4 or (
        parallel.tensor == 2 and (parallel.expert > 1 or not parallel.sequence)
    )
    if further and family in FEWER:
        return False
    if family in LINEAR and parallel.context > 1:
        return False
    if family in DENSE:
        return parallel.expert == 1
    return parallel.tensor == 1 or parallel.sequence


def sequences() -> list[list[int]]:
    """Long enough for scaled RoPE to matter; one has nothing to score."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for length in (301, 1, 2, 57, 256, 33)
    ]


def config(family: str, **changes: Any) -> Any:
    """transformers' configuration of the family's little model, or with changed sizes."""
    from transformers import AutoConfig

    model_type, tied, own = _OWN[family]
    sizes = copy.deepcopy(
        {**_SIZES, "rope_parameters": _ROPE, **own, **changes}
    )  # transformers writes into it
    if "layer_types" in sizes:
        sizes["layer_types"] = (sizes["layer_types"] * 2)[: sizes["num_hidden_layers"]]
    return AutoConfig.for_model(model_type, tie_word_embeddings=tied, **sizes)


def write_checkpoint(family: str, folder: Path) -> None:
    """A float32 checkpoint in transformers' own format, all weights random: norms and biases, too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config(family))
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for parameter in (*model.parameters(), *biases):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            if parameter.dim() == 1 and family != "gemma3":  # whose norms multiply by 1 + weight
                parameter.add_(1.0)
        for name, parameter in model.named_parameters() if family in LINEAR else ():
            if parameter.dim() == 1 and not name.endswith("linear_attn.norm.weight"):
                # Zero-centred norms, and states that last.
                parameter.sub_(3.0 if name.endswith(("A_log", "dt_bias")) else 1.0)
    model.float().save_pretrained(folder)


def reference(folder: Path) -> list[Tensor]:
    """Per sequence the log-probs [n - 1] of transformers in float32, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in map(torch.tensor, sequences()):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].float().log_softmax(-1)
        found.append(log_probs[:-1].gather(-1, ids[1:, None])[:, 0])
    return found
