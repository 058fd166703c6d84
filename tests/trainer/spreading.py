"""On every rank of a layout: whether the tokens of a rollout come to the packs that they belong to."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from megatron_fspo.config import Parallel
from megatron_fspo.config.fp8 import BF16
from megatron_fspo.packing.batch import StepTotals
from megatron_fspo.parallel.groups import ParallelGroups, gather_lists, share
from megatron_fspo.trainer.rollout import (
    Rollout,
    describe,
    layout_of,
    make_mini_batches,
    rollout_of,
    with_advantages,
)
from megatron_fspo.types import Completion, Prompt

LENGTHS = [[5, 9, 2], [1, 1, 30], [4, 0, 7], [12, 3, 6], [2, 2, 2], [8, 17, 1]]
"""Of the responses to each prompt; mini-batches of three prompts."""
IDLE = [1, 3, 4]
"""Prompts whose responses have no advantage."""


def rollout_on(groups: ParallelGroups) -> tuple[Rollout, list[Completion]]:
    """A rollout as this rank holds it, and all of its completions."""
    numbers = random.Random(1)
    prompts = [Prompt(index=i, token_ids=tuple(range(1, i + 2)), text="", answer="") for i in range(6)]
    completions = [
        Completion(
            token_ids=[numbers.randrange(1000) for _ in range(length)],
            log_probs=[-numbers.random() for _ in range(length)],
            finish_reason="stop",
            weight_version=0,
        )
        for row in LENGTHS
        for length in row
    ]
    owner = [number // 3 % groups.dp.size() for number in range(len(completions))]
    table = [(*describe(c, rank), 1.0, 1.0) for c, rank in zip(completions, owner, strict=True)]
    mine = [n for n, rank in enumerate(owner) if groups.first_of_copy and rank == groups.dp.rank()]
    rollout = rollout_of(
        prompts, 3, torch.tensor(table, dtype=torch.float64), {n: completions[n] for n in mine}
    )
    advantages = torch.tensor([[0.0] * 3 if i in IDLE else [1.0, -0.5, -0.5] for i in range(6)])
    return with_advantages(rollout, advantages), completions


def check_spreading(groups: ParallelGroups, parallel: Parallel) -> None:
    """Every response token is on one rank of data × context parallel; alike on those that share a model."""
    for entropy in (0.0, 0.1):
        config: Any = SimpleNamespace(
            batch=SimpleNamespace(mini_batches=2, max_tokens=48, balance="tokens"),
            loss=SimpleNamespace(entropy_coef=entropy, kl_coef=0.0),
            fp8=BF16,
            parallel=parallel,
        )
        rollout, completions = rollout_on(groups)
        layout = layout_of(config, SimpleNamespace(), groups, torch.device("cpu"))  # type: ignore[arg-type]
        packs, sizes = make_mini_batches(config, rollout, groups, layout)
        left_out = {3 * i + j for i in IDLE for j in range(3)} if not entropy else set()
        for part, size in enumerate(sizes):
            batches = packs[sum(sizes[:part]) :][:size]
            numbers = range(9 * part, 9 * part + 9)
            lengths = {n: len(completions[n].token_ids) for n in numbers}
            want = StepTotals(
                num_sequences=sum(length > 0 for length in lengths.values()),
                num_tokens=sum(lengths.values()),
                packed_tokens=sum(length for n, length in lengths.items() if n not in left_out),
            )
            assert all(batch.totals == want for batch in batches)
            found = []
            for batch in batches:
                index, mask = batch.sample_index, batch.mask
                assert torch.equal(batch.advantages.double(), rollout.advantages[index])
                here = index[batch.segment[mask]]
                position = batch.position_ids[0][mask] - rollout.prompt_lengths[here] + 1
                columns = (here, position, batch.labels[mask], batch.sampled_log_probs[mask])
                found += zip(*(column.tolist() for column in columns), strict=True)
            for group in (groups.tp, groups.pp):
                assert share(found, group=group) == found
            everywhere = sorted(gather_lists(found, group=groups.dp_cp))
            assert everywhere == [
                (n, i, completions[n].token_ids[i], completions[n].log_probs[i])
                for n in numbers
                if n not in left_out
                for i in range(lengths[n])
            ]
