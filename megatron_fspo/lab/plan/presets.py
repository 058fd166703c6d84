"""Shapes of published models, as the ``config.json`` of each says, for plans without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_fspo.errors import InputError
from megatron_fspo.weights import Architecture, Experts, read_architecture

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "tied": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "dtype": torch.bfloat16,
}
_LLAMA31: dict[str, Any] = {
    "model_type": "llama",
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tied": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_factor": 8.0,
    "max_position_embeddings": 131072,
    "dtype": torch.bfloat16,
}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> Architecture:
    values = {"num_kv_heads": 8, **_QWEN3, **more}
    return Architecture(num_layers=layers, hidden_size=hidden, num_heads=heads, ffn_size=ffn, **values)


def _experts(ffn: int) -> dict[str, Any]:
    experts = Experts(count=128, per_token=8, ffn_size=ffn, normalize_top_k=True)
    return {"model_type": "qwen3_moe", "num_kv_heads": 4, "experts": experts}


PRESETS = {
    "smollm2-135m": Architecture(
        model_type="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49152,
        tied=True,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, **_experts(768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, **_experts(1536)),
    "llama-3.1-8b": Architecture(num_layers=32, hidden_size=4096, num_heads=32, ffn_size=14336, **_LLAMA31),
    "llama-3.1-70b": Architecture(num_layers=80, hidden_size=8192, num_heads=64, ffn_size=28672, **_LLAMA31),
}


def find_model(name: str) -> Architecture:
    """A preset, or the shape that a checkpoint folder's ``config.json`` (or that file) has.

    Raises:
        InputError: it is neither, or of a kind that is not supported.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise InputError(f"{name}: neither a folder with a config.json nor one of {', '.join(PRESETS)}")
    return read_architecture(folder)
