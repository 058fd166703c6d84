"""Experts one by one, as in a checkpoint, of transformers' model, which holds those of a layer together."""

from __future__ import annotations

import torch
from torch import Tensor


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Checkpoint's name → gradient."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        layer, experts, part = name.partition(".experts.")
        if not experts:
            gradients[name] = parameter.grad
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for number, gradient in enumerate(parameter.grad):
            for own, values in zip(parts, gradient.chunk(len(parts)), strict=True):
                gradients[f"{layer}.experts.{number}.{own}.weight"] = values
    return gradients
