"""How many layers fit a GPU; needs none."""

from __future__ import annotations

from dataclasses import replace

from gpu_sizes import QWEN3_8B
from step_memory import layers_that_fit, state_bytes

from megatron_fspo.weights import expected_hf_shapes

GIB = 2**30
FIT = {"tokens": 16384, "ranks": 1, "fp8": False}


def test_a_whole_8b_with_adam_takes_137_gib_and_fits_no_gpu_of_80() -> None:
    count = sum(
        rows * columns
        for shape in expected_hf_shapes(QWEN3_8B).values()
        if len(shape) == 2
        for rows, columns in [shape]
    )
    assert state_bytes(QWEN3_8B, ranks=1, fp8=False) == 18 * count
    assert 137 * GIB < 18 * count < 138 * GIB
    layers = layers_that_fit(QWEN3_8B, 78 * GIB, **FIT)
    assert 8 <= layers < QWEN3_8B.num_layers
    # One more would leave nothing to spare.
    assert state_bytes(replace(QWEN3_8B, num_layers=layers), ranks=1, fp8=False) < 66 * GIB
