"""Turns of a pack, on every context-parallel rank, against the runs of tokens that were written."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.packing.batch import Sequences
from megatron_fspo.packing.pack import PackLayout, collate, plan_packs

RESPONSES = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=5)


@given(responses=RESPONSES, size=st.sampled_from([1, 2, 3]), data=st.data())
def test_turns_are_runs_of_written_tokens(
    responses: list[list[bool]], size: int, data: st.DataObject
) -> None:
    prompts = [[1] * (1 + number % 3) for number in range(len(responses))]
    sequences = Sequences.of(
        prompts=prompts,
        responses=[[7] * len(row) for row in responses],
        advantages=[1.0] * len(responses),
        loss_mask=responses,
    )
    chosen = data.draw(st.lists(st.sampled_from(range(len(responses))), unique=True))
    _, totals = plan_packs(sequences, PackLayout(max_tokens=1000))
    runs = [
        [
            [place for place, _ in run]
            for written, run in groupby(enumerate(responses[i]), lambda x: x[1])
            if written
        ]
        for i in chosen
    ]
    numbered = [(owner, run) for owner, some in enumerate(runs) for run in some]
    held: dict[tuple[int, int], int] = {}
    for rank in range(size):
        batch = collate(
            sequences, chosen, totals, PackLayout(max_tokens=1000, context_rank=rank, context_size=size)
        )
        turns = batch.turns
        assert turns is not None
        assert turns.owner.tolist() == [owner for owner, _ in numbered]
        assert turns.lengths.tolist() == [len(run) for _, run in numbered]
        assert (turns.segment[~batch.loss_mask] == len(numbered)).all()
        for row in batch.rows.tolist():
            owner = int(batch.segment[row])
            place = int(batch.position_ids[0, row]) + 1 - len(prompts[chosen[owner]])
            held[owner, place] = int(turns.segment[row])
    assert held == {(owner, place): turn for turn, (owner, run) in enumerate(numbered) for place in run}
