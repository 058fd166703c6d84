"""Tests that need no GPU: how many layers fit one, and the table."""

from __future__ import annotations

import pytest
from gpu_sizes import FULL, QWEN3_8B, TINY
from gpu_table import Row, as_markdown, as_text
from step_memory import layers_that_fit, narrowed, state_bytes

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
    assert state_bytes(narrowed(QWEN3_8B, layers), ranks=1, fp8=False) < 66 * GIB


def test_more_memory_or_gpus_hold_more_layers_and_fp8_fewer() -> None:
    fits = [layers_that_fit(QWEN3_8B, gib * GIB, **FIT) for gib in (46, 78, 139, 190)]
    assert fits == sorted(set(fits)) and fits[-1] == QWEN3_8B.num_layers
    assert layers_that_fit(QWEN3_8B, 78 * GIB, tokens=16384, ranks=8, fp8=False) > 2 * fits[1]
    assert layers_that_fit(QWEN3_8B, 78 * GIB, tokens=16384, ranks=1, fp8=True) < fits[1]
    with pytest.raises(ValueError, match=r"16\.0 GiB are not enough"):
        layers_that_fit(QWEN3_8B, 16 * GIB, **FIT)


@pytest.mark.parametrize("sizes", [FULL, TINY])
def test_micro_batches_hold_the_longest_sample(sizes: object) -> None:
    for name in ("noise", "ring", "step"):
        size = getattr(sizes, name)
        longest = max(prompt + response for prompt, response in size.shapes)
        # The other packs of the FP8 test have half the tokens.
        assert longest <= size.max_tokens / (2 if name == "noise" else 1), name


def test_the_table() -> None:
    rows = [
        Row(item="head", what="peak", value=1.23456, beside=20.0, unit="GiB"),
        Row(item="FP8 blockwise", what="values", value=0, beside=0),
        Row(item="head", what="error", value=9.5e-7),
    ]
    assert as_text(rows).splitlines()[1] == "head           peak    1.23      20      GiB"
    machine = {"name": "a GPU", "count": 2, "total": 80 * GIB, "versions": {"torch": "2"}}
    page = as_markdown(rows, machine, 7, ["x: needs y"])
    assert "# 2 × a GPU" in page and "| head | error | 9.50e-07 |  |  |" in page and "- x: needs y" in page
    assert "\n7 tests passed.\n" in page
