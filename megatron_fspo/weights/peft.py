"""A folder of adapters as PEFT writes and loads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron_fspo.weights.architecture import Adapters

_PREFIX = "base_model.model."


def write_adapters(out: Path, tensors: Iterable[tuple[str, Tensor]], adapters: Adapters, base: Path) -> None:
    """Write the factors, under the names of :func:`~megatron_fspo.weights.table.adapter_shapes`, of adapters
    on the model in the folder ``base``."""
    out.mkdir(parents=True, exist_ok=True)
    named = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors}
    save_file(named, out / "adapter_model.safetensors", metadata={"format": "pt"})
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
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
