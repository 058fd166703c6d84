"""Packs for products that take multiples of so many rows only (FP8): per rank, under every way to split."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fspo.config import Parallel
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.packing.batch import Sequences
from megatron_fspo.packing.pack import PackLayout, pack, plan_step
from megatron_fspo.parallel.groups import ParallelGroups, pack_layout

LENGTHS = [1, 2, 3, 15, 16, 17, 31, 33, 64, 97]


def group(rank: int = 0, size: int = 1) -> Any:
    """A rank of a process group."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def of_rank(rank: int, parallel: Parallel, recipe: Any) -> Any:
    """What one context-parallel rank gets of all sequences, in packs of about 100 tokens."""
    one, cp, tp = group(), group(rank, parallel.context), group(0, parallel.tensor)
    groups = ParallelGroups(tp=tp, pp=one, cp=cp, ep=one, edp=one, dp=one, dp_cp=cp)
    layout = pack_layout(
        groups,
        torch.device("cpu"),
        sequence=parallel.sequence,
        interleaved=parallel.interleaved,
        align=FP8(recipe=recipe).align,
    )
    sequences = Sequences.of(
        prompts=[[1]] * len(LENGTHS),
        responses=[[2] * length for length in LENGTHS],
        advantages=[1.0] * len(LENGTHS),
    )
    return pack(sequences, replace(layout, max_tokens=112))


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(("recipe", "align"), [("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32)])
def test_rows_of_each_rank_and_of_each_tensor_rank_under_it(
    recipe: str, align: int, tensor: int, context: int
) -> None:
    parallel = Parallel(tensor=tensor, sequence=tensor > 1, context=context)
    ranks = [of_rank(rank, parallel, recipe) for rank in range(context)]
    trained = [0] * len(LENGTHS)
    for batches in zip(*ranks, strict=True):
        borders = batches[0].borders
        # Attention splits every sequence, padding too, into 2·CP chunks.
        assert not (borders % (2 * context if context > 1 else 1)).any()
        for batch in batches:
            rows = batch.tokens.shape[1]
            # Before and behind the layers that are split along the sequence, TP ranks have a share each.
            assert rows % (align * tensor) == 0
            assert torch.equal(batch.borders, borders) and int(borders[-1]) == rows * context
            # Padding is in nobody's sequence.
            assert (batch.segment[batch.loss_mask] < len(batch.lengths)).all()
            for row, index in enumerate(batch.sample_index.tolist()):
                trained[index] += int((batch.loss_mask & (batch.segment == row)).sum())
        used = sum(int(batch.sample_index.numel()) for batch in batches[:1])
        assert used, "a pack of padding only"
    assert trained == LENGTHS


def test_a_step_counts_the_sequences_of_all_ranks_and_no_empty_response() -> None:
    plan, totals = plan_step([3, 3, 3, 3], [2, 0, 5, 1], PackLayout(data_size=2))
    assert (totals.num_sequences, totals.num_tokens, totals.packed_tokens) == (3, 8, 8)
    assert sorted(number for rank in plan for numbers in rank for number in numbers) == [0, 1, 2, 3]
