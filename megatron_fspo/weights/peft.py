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

_WITHOUT_EFFECT = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout"
    " eva_config megatron_config megatron_core qalora_group_size runtime_config r lora_alpha".split()
)
"""Keys of PEFT's configuration that are checked elsewhere, or do not change what trained adapters compute."""
_PLAIN = {
    "peft_type": ("LORA",),
    "use_rslora": (True, False),
    "bias": ("none",),
    # Others change the base's weights, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Key → its values for plain LoRA; of any other key, those that leave a feature out."""
_SUPPORTED = "but only plain LoRA is supported, with one rank and scale, of the target_modules"
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
    """Read the factors A and B by name. Raises ``InputError`` if they are unreadable or do not fit ``arch``,
    or PEFT would not compute W + scale · B A with them for exactly these targets."""
    adapters = arch.adapters
    assert adapters is not None
    try:
        for name in (_WEIGHTS, _CONFIG):
            if not (folder / name).is_file():
                raise OSError(f"it has no file {name}")
        config = dict(json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
        tensors, scale = load_file(folder / _WEIGHTS), _scale(config)
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError, SafetensorError) as error:
        raise InputError(f"{folder} is not a readable PEFT adapter folder: {error}") from None
    if config.get("r") != adapters.rank or not math.isclose(scale, adapters.scale):
        raise InputError(
            f"{folder} has rank {config.get('r')} and scale {scale:g}; lora.rank is {adapters.rank}, and "
            f"lora.alpha and lora.rslora make the scale {adapters.scale:g}"
        )
    names = [f"{target}_proj" for target in adapters.targets]
    for key, value in config.items():
        plain = key in _WITHOUT_EFFECT or value in _PLAIN.get(key, (None, False, [], {}, ""))
        if key == "target_modules":
            given = value if isinstance(value, list) else []
            plain = value == "all-linear" or sorted(
                str(target).rpartition(".")[2] for target in given
            ) == sorted(names)
        elif key in ("rank_pattern", "alpha_pattern") and isinstance(value, dict):
            same = adapters.rank if key == "rank_pattern" else config["lora_alpha"]
            plain = all(rank == same for rank in value.values())
        if not plain:
            raise InputError(
                f"{folder}: {_CONFIG} has {key} = {value!r:.99}, {_SUPPORTED} {', '.join(names)}"
            )
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    shapes = adapter_shapes(arch)
    for name in sorted(named.keys() ^ shapes.keys()):
        which = "has no tensor" if name in shapes else "has the unexpected tensor"
        raise InputError(f"{folder} {which} {name}; lora.targets are {', '.join(adapters.targets)}")
    for name, tensor in named.items():
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            what = f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise InputError(
                f"{folder}: {name} is {what}; the model needs {shapes[name]}, of a floating type"
            )
        check_finite(tensor, f"{folder}: {name}")
    return named


def _scale(config: dict[str, Any]) -> float:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"r = {rank!r:.50} and lora_alpha = {alpha!r:.50} must be numbers, and r at least 1")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
