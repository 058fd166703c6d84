"""A folder of adapters as PEFT writes and loads it."""

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
    """Write the factors, under the names of :func:`~megatron_fspo.weights.table.adapter_shapes`, of adapters
    on the model in the folder ``base``."""
    out.mkdir(parents=True, exist_ok=True)
    named = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors}
    save_file(named, out / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": adapters.rank,
        # PEFT divides it by r.
        "lora_alpha": adapters.scale * adapters.rank,
        "target_modules": sorted(f"{target}_proj" for target in adapters.targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapters(folder: Path, arch: Architecture) -> dict[str, Tensor]:
    """The factors of a folder, by the names of :func:`~megatron_fspo.weights.table.adapter_shapes`.

    Raises:
        InputError: no such folder, or its adapters are not those of ``arch``: rank, scale, targets, layers.
    """
    adapters = arch.adapters
    assert adapters is not None
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors, scale = load_file(folder / _WEIGHTS), _scale(config)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"{folder} is no folder of adapters as PEFT writes it: {error}") from None
    if config.get("r") != adapters.rank or not math.isclose(scale, adapters.scale):
        raise InputError(
            f"{folder}: rank {config.get('r')} and scale {scale:g}; the run asks for {adapters.rank} and "
            f"{adapters.scale:g}: lora.rank, lora.alpha, lora.rslora"
        )
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    shapes = adapter_shapes(arch)
    for name in sorted(named.keys() ^ shapes.keys()):
        which = "has no" if name in shapes else "has a"
        raise InputError(f"{folder} {which} {name}; lora.targets are {', '.join(adapters.targets)}")
    for name, tensor in named.items():
        if tuple(tensor.shape) != shapes[name]:
            raise InputError(f"{folder}: {name} is {tuple(tensor.shape)}; the model makes it {shapes[name]}")
        check_finite(tensor, f"{folder}: {name}")
    return named


def _scale(config: dict[str, Any]) -> float:
    rank = config.get("r") or 1
    return float(config.get("lora_alpha", 0) / (math.sqrt(rank) if config.get("use_rslora") else rank))
