"""What a forward pass costs."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fspo.weights.architecture import Architecture

BACKWARD = 2
"""Cost of a backward pass in forward passes: one product for the inputs' gradient, one for the weights'."""


def layer_flops(arch: Architecture, tokens: float) -> float:
    """Return the FLOPs of all layers for one sequence of ``tokens``; see :func:`forward_flops`."""
    seen = min(tokens, arch.window or tokens)
    pairs = arch.count("full") * tokens**2 + arch.count("window") * (2 * tokens - seen) * seen  # twice
    states = 6 * arch.count("linear") * arch.state_size * tokens
    return 2 * arch.num_layers * arch.layer_size * tokens + (arch.q_size + arch.value_size) * pairs + states


def forward_flops(
    arch: Architecture,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    prompts: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> float:
    """Return the FLOPs of a forward pass over separate sequences; a multiply-add counts as 2.

    A sequence of T = prompt + response tokens, L of them written by the policy, costs, with P =
    ``layer_size``::

        2 · layers · P · T  +  layers · (q_size + value_size) · T²  +  2 · vocabulary · hidden · L

    The second term is causal attention: q·k and weights·v over T² / 2 pairs each, fewer with a window. In a
    linear layer it is 6 · ``state_size`` · T: a token reads the state twice and writes to it once.
    Norms, softmax and RoPE are omitted, as is usual. ``lengths`` has each L, by default that of the response.
    Neighbours with equal numbers in ``prompts`` share their prompt except its last token. All rows of a
    trajectory count as one sequence, an upper bound.
    """
    lengths = response_lengths if lengths is None else lengths

    flops: float = 0
    for i, (prompt, response, length) in enumerate(
        zip(prompt_lengths, response_lengths, lengths, strict=True)
    ):
        flops += layer_flops(arch, prompt + response) + 2 * arch.vocab_size * arch.hidden_size * length
        if i and prompts is not None and prompts[i] == prompts[i - 1]:
            flops -= layer_flops(arch, prompt - 1)
    return flops
