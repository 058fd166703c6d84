"""A model whose local layers see what FP8 would leave of weights and activations, on any device.

The products themselves are in the model's own precision. What differs from a GPU: the order of sums, and that
a norm's output is rounded to bf16 before it is quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from megatron_fspo.config.fp8 import FP8
from megatron_fspo.lab.calibrate.fp8_values import through_fp8
from megatron_fspo.mcore.model.model import layer_offset
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.passes.fp8 import LINEARS


@torch.no_grad()
def emulate_fp8(model: Model, fp8: FP8) -> int:
    """Have a model for scoring, of local layers (those of Transformer Engine take what is not yet normed),
    its weights loaded, compute as with ``fp8``; its weights are lost. Returns the matrices of this rank that
    do."""
    assert model.backend.layers == "local"

    def quantize_input(_: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        values, *rest = inputs
        return through_fp8(values, fp8.recipe), *rest

    first, end = fp8.first_last_layers_bf16, model.arch.num_layers - fp8.first_last_layers_bf16
    count = 0
    for chunk in model.chunks:
        offset = layer_offset(model.config, chunk)
        for number, layer in enumerate(chunk.decoder.layers, start=offset):
            for name, module in layer.named_modules():
                if first <= number < end and name.rpartition(".")[2] in LINEARS:
                    module.weight.copy_(through_fp8(module.weight, fp8.recipe, weight=True))
                    module.register_forward_pre_hook(quantize_input)
                    count += 1
    return count
