"""Read and write LoRA adapters in PEFT's folder format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import Adapters, Architecture
from megatron_fspo.weights.reader import check_finite
from megatron_fspo.weights.table import adapter_shapes

_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(out: Path, tensors: Iterable[tuple[str, Tensor]], adapters: Adapters, base: Path) -> None:
    """Write the factors A and B, named as in :func:`~.table.adapter_shapes`; ``base`` is the base model."""
    out.mkdir(parents=True, exist_ok=True)
    named = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors}
    save_file(named, out / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": adapters.rank,
        # PEFT's scale is lora_alpha / r.
        "lora_alpha": adapters.scale * adapters.rank,
        "target_modules": sorted(f"{target}_proj" for target in adapters.targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapters(folder: Path, arch: Architecture) -> dict[str, Tensor]:
    """Read the factors A and B by name; ``InputError`` if they are unreadable or do not fit ``arch``."""
    adapters = arch.adapters
    assert adapters is not None
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors, scale = load_file(folder / _WEIGHTS), _scale(config)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"{folder} is not a readable PEFT adapter folder: {error}") from None
    if config.get("r") != adapters.rank or not math.isclose(scale, adapters.scale):
        raise InputError(
            f"{folder} has rank {config.get('r')} and scale {scale:g}; lora.rank is {adapters.rank}, and "
            f"lora.alpha and lora.rslora make the scale {adapters.scale:g}"
        )
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    shapes = adapter_shapes(arch)
    for name in sorted(named.keys() ^ shapes.keys()):
        which = "has no tensor" if name in shapes else "has the unexpected tensor"
        raise InputError(f"{folder} {which} {name}; lora.targets are {', '.join(adapters.targets)}")
    for name, tensor in named.items():
        if tuple(tensor.shape) != shapes[name]:
            raise InputError(f"{folder}: {name} is {tuple(tensor.shape)}; the model needs {shapes[name]}")
        check_finite(tensor, f"{folder}: {name}")
    return named


def _scale(config: dict[str, Any]) -> float:
    rank = config.get("r") or 1
    return float(config.get("lora_alpha", 0) / (math.sqrt(rank) if config.get("use_rslora") else rank))
