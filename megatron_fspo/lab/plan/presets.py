"""Shapes of published models, from their ``config.json``, for plans without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_fspo.data.hub import find_checkpoint
from megatron_fspo.errors import InputError
from megatron_fspo.weights import Architecture, Experts, read_architecture

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "tied": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
_LLAMA31: dict[str, Any] = {
    "model_type": "llama", "num_kv_heads": 8, "head_dim": 128, "vocab_size": 128256, "tied": False,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_factor": 8.0, "max_position_embeddings": 131072,
}  # fmt: skip
_SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "num_kv_heads": 3, "head_dim": 64, "vocab_size": 49152, "tied": True,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192,
}  # fmt: skip


def _dense(
    family: dict[str, Any], layers: int, hidden: int, heads: int, ffn: int, **more: Any
) -> Architecture:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_size": ffn}
    return Architecture(dtype=torch.bfloat16, **{**family, **sizes, **more})


def _mixture(layers: int, hidden: int, heads: int, ffn: int, expert: int) -> Architecture:
    experts = Experts(count=128, per_token=8, ffn_size=expert, normalize_top_k=True)
    more = {"model_type": "qwen3_moe", "num_kv_heads": 4, "experts": experts}
    return _dense(_QWEN3, layers, hidden, heads, ffn, **more)


PRESETS = {
    "smollm2-135m": _dense(_SMOLLM2, 30, 576, 9, 1536),
    "qwen3-0.6b": _dense(_QWEN3, 28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _dense(_QWEN3, 28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _dense(_QWEN3, 36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _dense(_QWEN3, 36, 4096, 32, 12288),
    "qwen3-14b": _dense(_QWEN3, 40, 5120, 40, 17408),
    "qwen3-32b": _dense(_QWEN3, 64, 5120, 64, 25600),
    "qwen3-30b-a3b": _mixture(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _mixture(94, 4096, 64, 12288, 1536),
    "llama-3.1-8b": _dense(_LLAMA31, 32, 4096, 32, 14336),
    "llama-3.1-70b": _dense(_LLAMA31, 80, 8192, 64, 28672),
}


def find_model(name: str) -> Architecture:
    """Return a preset by name, or read the architecture from a ``config.json`` or its folder.

    Raises:
        InputError: ``name`` is neither, or the model is not supported.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    folder = find_checkpoint(path.parent if path.name == "config.json" else path, weights=False)
    if not (folder / "config.json").is_file():
        raise InputError(f"{name} is neither a folder with a config.json nor one of {', '.join(PRESETS)}")
    return read_architecture(folder)
