"""What a Hugging Face ``config.json`` says about the shape of a model.

Every size the conversion uses comes from here, and ``mcore`` builds Megatron's configuration from the same
record, so the weights and the model that receives them cannot disagree. What Megatron would compute
differently from transformers (biases, sliding windows, scaled RoPE, quantised weights) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.errors import InputError

SUPPORTED = ("qwen3",)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The numbers of one model.

    Example (Qwen3-0.6B)::

        Architecture(model_type="qwen3", num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8,
                     head_dim=128, ffn_size=3072, vocab_size=151936, tied=True, rms_norm_eps=1e-6,
                     rope_theta=1e6, max_position_embeddings=40960, dtype=torch.bfloat16)
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Megatron's query groups."""
    head_dim: int
    """Not hidden_size / num_heads in general."""
    ffn_size: int
    vocab_size: int
    """Rows of the Hugging Face embedding; Megatron's table may be padded beyond them."""
    tied: bool
    """The output layer is the embedding."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    dtype: torch.dtype
    """The dtype the config names; a file's own is asked of ``HFReader``."""

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_size(self) -> int:
        """Parameters in the matrices of one layer."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.ffn_size)


def read_architecture(checkpoint_dir: str | Path) -> Architecture:
    """The architecture of a checkpoint folder; ``InputError`` if it is not one we compute exactly."""
    config = _Config(Path(checkpoint_dir) / "config.json")
    model_type = config.required("model_type", str)
    if model_type not in SUPPORTED:
        raise config.error("model_type", f"is {model_type!r}; supported: {', '.join(SUPPORTED)}")
    _refuse_unsupported(config)
    arch = Architecture(
        model_type=model_type,
        num_layers=config.size("num_hidden_layers"),
        hidden_size=config.size("hidden_size"),
        num_heads=config.size("num_attention_heads"),
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim"),
        ffn_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        tied=config.required("tie_word_embeddings", bool),
        rms_norm_eps=float(config.required("rms_norm_eps", float, int)),
        rope_theta=_rope_theta(config),
        max_position_embeddings=config.size("max_position_embeddings"),
        dtype=_dtype(config),
    )
    if arch.num_heads % arch.num_kv_heads:
        problem = f"is {arch.num_kv_heads}, which does not divide num_attention_heads {arch.num_heads}"
        raise config.error("num_key_value_heads", problem)
    return arch


def check_tensor_parallel(arch: Architecture, tp_size: int, padded_vocab: int | None = None) -> None:
    """``InputError`` unless the model splits evenly over ``tp_size`` ranks."""
    if tp_size < 1:
        raise InputError(f"tensor-parallel size {tp_size} must be at least 1")
    counts = {
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "intermediate_size": arch.ffn_size,
    }
    for key, count in counts.items():
        if count % tp_size:
            raise InputError(f"tensor-parallel size {tp_size} does not divide {key} {count}")
    if padded_vocab is not None and (padded_vocab < arch.vocab_size or padded_vocab % tp_size):
        raise InputError(
            f"padded vocabulary {padded_vocab} must be at least vocab_size {arch.vocab_size} "
            f"and a multiple of the tensor-parallel size {tp_size}"
        )


class _Config:
    """``config.json`` with errors that name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"{path} not found; a Hugging Face checkpoint folder has one")
        try:
            values = json.loads(path.read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InputError(f"{path} must hold a JSON object")
        self.values: dict[str, Any] = values

    def error(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.path}: {key} {problem}")

    def optional(self, key: str) -> Any:
        """The value, or None where the key is absent or null: transformers writes both for "unset"."""
        return self.values.get(key)

    def required(self, key: str, *types: type) -> Any:
        value = self.optional(key)
        if value is None:
            raise self.error(key, "is missing")
        if type(value) not in types:  # not isinstance: true is an int
            raise self.error(key, f"is {value!r}; it must be {' or '.join(t.__name__ for t in types)}")
        return value

    def size(self, key: str) -> int:
        value: int = self.required(key, int)
        if value < 1:
            raise self.error(key, f"is {value}; it must be at least 1")
        return value


def _refuse_unsupported(config: _Config) -> None:
    if config.optional("attention_bias"):
        raise config.error("attention_bias", "is true; projections with a bias are not supported")
    if config.required("hidden_act", str) != "silu":
        raise config.error("hidden_act", f"is {config.values['hidden_act']!r}; only 'silu' is supported")
    sliding = [kind for kind in config.optional("layer_types") or [] if kind != "full_attention"]
    if config.optional("use_sliding_window"):
        raise config.error("use_sliding_window", "is true; only full attention is supported")
    if sliding:
        raise config.error("layer_types", f"has {sliding[0]!r}; only 'full_attention' is supported")
    if config.optional("quantization_config"):
        raise config.error("quantization_config", "is set; only float checkpoints are supported")


def _rope_theta(config: _Config) -> float:
    """transformers 5 writes ``rope_parameters``; transformers 4 ``rope_theta`` and ``rope_scaling``."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.optional(key) or {}
        if not isinstance(rope, Mapping):
            raise config.error(key, f"is {rope!r}; it must be an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise config.error(key, f"has rope_type {kind!r}; only 'default' is supported")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise config.error(key, "has a partial_rotary_factor; only full rotation is supported")
    thetas = [config.optional("rope_theta"), (config.optional("rope_parameters") or {}).get("rope_theta")]
    found = [theta for theta in thetas if theta is not None]
    if not found:
        raise config.error("rope_theta", "is missing, at the top level and in rope_parameters")
    if len(set(found)) > 1:
        raise config.error("rope_theta", f"is {found[0]!r}, but rope_parameters says {found[1]!r}")
    if type(found[0]) not in (int, float) or found[0] <= 0:
        raise config.error("rope_theta", f"is {found[0]!r}; it must be a positive number")
    return float(found[0])


def _dtype(config: _Config) -> torch.dtype:
    """transformers 5 writes ``dtype``, transformers 4 ``torch_dtype``."""
    key = "torch_dtype" if config.optional("dtype") is None and "torch_dtype" in config.values else "dtype"
    name = config.required(key, str)
    if name not in _DTYPES:
        raise config.error(key, f"is {name!r}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]
