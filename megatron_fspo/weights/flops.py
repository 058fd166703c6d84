"""Floating-point operations of a model, from its shape alone."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fspo.weights.architecture import Architecture

BACKWARD = 2
"""Of a backward pass, in forward passes: one product for the inputs' gradient, one for the weights'."""


def forward_flops(arch: Architecture, prompt_lengths: Sequence[int], lengths: Sequence[int]) -> int:
    """Of one forward pass over sequences of their own, 2 for each multiplication with its addition.

    For a sequence of T = prompt + L tokens, with layers · P parameters in matrices that a token meets::

        2 · layers · P · T  +  2 · layers · q_size · T²  +  2 · vocabulary · hidden · L

    The second term is causal attention: q·k and weights·v over T² / 2 pairs each. The head is computed for
    response tokens only. Norms, softmax and RoPE are left out, as is usual.

    Args:
        prompt_lengths, lengths: in tokens, of each sequence.
    """
    flops = 0
    for prompt, length in zip(prompt_lengths, lengths, strict=True):
        tokens = prompt + length
        flops += 2 * arch.num_layers * (arch.layer_size * tokens + arch.q_size * tokens**2)
        flops += 2 * arch.vocab_size * arch.hidden_size * length
    return flops
