"""Checkpoints of every family that are small enough to train on make-sum, with its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import families
from launch import REPO

_DENSE = ("mistral", "phi3", "granite", "glm4", "gemma3", "olmo2", "olmo3")
NEW = (*_DENSE, "qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight", *families.LINEAR)
LETTERS = REPO / "examples/make_sum/checkpoint"
_SIZES = {
    "vocab_size": 14,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **{"bos_token_id": 11, "eos_token_id": 12, "pad_token_id": 13},
}


def write(family: str, folder: Path, **changes: Any) -> Path:
    """A float32 checkpoint of random weights: first layers dense where the family has such, a window that is
    shorter than the responses, and biases of routers that decide."""
    from transformers import AutoModelForCausalLM

    sizes = {**_SIZES, "initializer_range": 0.15} | changes
    if family in ("deepseek_v3", "moonlight"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if family in ("mistral", "gemma3", "olmo3"):
        sizes["sliding_window"] = 12
    if family in ("gemma3", "olmo3"):
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    if family in families.LINEAR:
        sizes["vocab_size"] = 15  # transformers' tokenizer for these families adds a token
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(families.config(family, **sizes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) * 0.3)
    model.float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(LETTERS / name, folder / name)
    return folder
