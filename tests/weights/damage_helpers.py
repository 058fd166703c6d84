"""Ways to damage a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights_helpers import edit_config

Damage = Callable[[Path], object]
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def config(**changes: Any) -> Damage:
    """Set keys of config.json; ``...`` removes one."""
    return lambda folder: edit_config(folder, **changes)


def edit_tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """Replace one tensor of the single file, or drop it where ``change`` returns None."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / ONE)
        new = change(tensors.pop(name, torch.zeros(3)))
        save_file(tensors if new is None else tensors | {name: new}, folder / ONE)

    return damage


def put(value: float) -> Callable[[Tensor], Tensor]:
    """A change of one value, the last row's."""
    return lambda tensor: tensor.index_put((torch.tensor(-1),), torch.tensor(value))


def cut(size: int, file: str | Path = ONE) -> Damage:
    """Keep the first ``size`` bytes of a file, or drop its last ones where it is negative."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])
