"""GPU memory of a training step of a model, and how many layers fit."""

from __future__ import annotations

from dataclasses import replace

from megatron_fspo.weights import Architecture

_LEFT = 0.08
"""Share of the free memory that the allocator loses to fragments."""
_WORKSPACE = 4 << 30
"""The head's block of logits and its gradients, products' workspaces, NCCL."""


def state_bytes(arch: Architecture, *, ranks: int, fp8: bool) -> int:
    """Parameters, gradients and optimizer of one rank, the optimizer spread over all.

    bf16 parameters and fp32 gradients, 6 bytes; masters and two moments in fp32, 12; in FP8 a copy of each
    matrix of a layer, and one transposed.
    """
    return int(_parameters(arch) * (6 + 12 / ranks) + (2 * arch.num_layers * arch.layer_size if fp8 else 0))


def layers_that_fit(arch: Architecture, free: int, *, tokens: int, ranks: int, fp8: bool) -> int:
    """The most layers, up to the model's own, that train with ``free`` bytes on each rank.

    Args:
        tokens: of a micro-batch; all layers but one are recomputed.

    Raises:
        ValueError: not even one.
    """
    for layers in range(arch.num_layers, 0, -1):
        if state_bytes(replace(arch, num_layers=layers), ranks=ranks, fp8=fp8) + _activations(
            arch, layers, tokens
        ) + _WORKSPACE <= free * (1 - _LEFT):
            return layers
    raise ValueError(f"{free / 2**30:.1f} GiB are not enough for one layer")


def _parameters(arch: Architecture) -> int:
    tables = arch.vocab_size * arch.hidden_size * (1 if arch.tied else 2)
    return arch.num_layers * arch.layer_size + tables


def _activations(arch: Architecture, layers: int, tokens: int) -> int:
    """In bf16 what enters each layer, all of one layer and its gradients, and twice fp32 at the end."""
    within = 4 * arch.hidden_size + 4 * (arch.q_size + 2 * arch.kv_size) + 6 * arch.ffn_size
    return tokens * (2 * layers * arch.hidden_size + 2 * 2 * within + 2 * 4 * arch.hidden_size)
