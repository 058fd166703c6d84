"""The routes of tokens follow them into packs, whichever rank holds them and whoever leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.packing.batch import Sequences
from megatron_fspo.packing.pack import PackLayout, pack

LAYERS, PER_TOKEN = 2, 3


def sequences_of(shapes: list[tuple[int, int]]) -> Sequences:
    """Routes say which token they are of: sequence, position, layer."""
    rows = [
        torch.tensor([[[i, at, layer] for layer in range(LAYERS)] for at in range(prompt + length - 1)])
        for i, (prompt, length) in enumerate(shapes)
    ]
    return Sequences.of(
        prompts=[[1] * prompt for prompt, _ in shapes],
        responses=[[2] * length for _, length in shapes],
        advantages=[1.0] * len(shapes),
        routes=torch.cat([row.view(-1, LAYERS, PER_TOKEN) for row in rows]).to(torch.uint8),
    )


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6),
    context=st.sampled_from([1, 2]),
    multiple_of=st.sampled_from([1, 4]),
)
def test_each_token_has_its_own_route(shapes: list[tuple[int, int]], context: int, multiple_of: int) -> None:
    for rank in range(context):
        layout = PackLayout(context_rank=rank, context_size=context, multiple_of=multiple_of)
        micro_batches = pack(sequences_of(shapes), layout)
        micro_batches = micro_batches.with_columns(
            routes=[batch.routes for batch in micro_batches],
            old_log_probs=[batch.position_ids[0].float() for batch in micro_batches],
        )
        for batch in micro_batches:
            assert batch.routes is not None and batch.routes.dtype == torch.uint8
            n = len(batch.lengths)
            for at, (segment, position) in enumerate(
                zip(batch.segment.tolist(), batch.position_ids[0].tolist(), strict=True)
            ):
                number = int(batch.sample_index[segment]) if segment < n else -1
                last = sum(shapes[number]) - 1 if segment < n else -1
                route = batch.routes[at]
                if position < last:
                    assert route.tolist() == [[number, position, layer] for layer in range(LAYERS)]
                    assert batch.old_log_probs is not None and batch.old_log_probs[at] == position
                else:
                    assert (route == 255).all(), "the last token, and padding"


def test_routes_of_other_sequences_are_refused() -> None:
    routes = torch.zeros(3, LAYERS, PER_TOKEN, dtype=torch.uint8)
    with pytest.raises(ValueError):
        Sequences.of(prompts=[[1]], responses=[[2, 2]], advantages=[0.0], routes=routes)


def test_without_routes_there_are_none() -> None:
    sequences = replace(sequences_of([(2, 3)]), routes=None)
    (batch,) = pack(sequences, PackLayout())
    assert batch.routes is None
