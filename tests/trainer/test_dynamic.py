"""Which groups a batch is made of, how many prompts are asked for, and rollouts that are joined and cut."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.trainer.dynamic import fill
from megatron_fspo.trainer.rollout import (
    COLUMNS,
    Rollout,
    describe,
    join,
    make_rollout,
    select,
    with_advantages,
)
from megatron_fspo.types import Completion, Prompt, VersionSpan

SAMPLES = 2
ALL_COLUMNS = (*COLUMNS, "advantages")


def make(varied: list[bool], serial: Any, *, rank: int = 0) -> Rollout:
    """One group per flag, each response unlike every other; held, as on ``rank``, where it is the owner.

    Args:
        serial: numbers that never come twice.
    """
    prompts, table, advantages, held = [], [], [], {}
    for flag in varied:
        prompts.append(
            Prompt(index=next(serial), token_ids=(1,) * (1 + next(serial) % 5), text="", answer="")
        )
        for i in range(SAMPLES):
            token = next(serial)
            completion = Completion(
                token_ids=(token,) * (1 + token % 7),
                log_probs=(-1.0,) * (1 + token % 7),
                finish_reason="length" if token % 3 else "stop",
                weight_version=token,
                version_spans=(VersionSpan(version=token, start=0, end=1 + token % 7),),
            )
            owner = token % 3
            if owner == rank:
                held[len(table)] = completion
            advantages.append((0.5 - i) * flag * (1 + token))
            table.append(describe(completion, owner, float(token), float(token)))
    rollout = make_rollout(prompts, SAMPLES, torch.tensor(table, dtype=torch.float64), held)
    return with_advantages(rollout, torch.tensor(advantages, dtype=torch.float64))


def responses(rollout: Rollout) -> list[tuple[Any, ...]]:
    """Everything of each response, with its prompt."""
    columns = [getattr(rollout, name).tolist() for name in ALL_COLUMNS]
    return [
        (rollout.prompts[n // SAMPLES], rollout.prompt_lengths[n].item(), rollout.held.get(n), *values)
        for n, values in enumerate(zip(*columns, strict=True))
    ]


flags = st.lists(st.booleans(), min_size=1, max_size=5)


@given(parts=st.lists(flags, min_size=1, max_size=4), data=st.data())
def test_responses_are_the_same_wherever_they_go(parts: list[list[bool]], data: st.DataObject) -> None:
    serial = count(1)
    rollouts = [make(varied, serial) for varied in parts]
    joined = join(rollouts)
    each = [response for rollout in rollouts for response in responses(rollout)]
    assert responses(joined) == each
    assert joined.has_variance.tolist() == [flag for varied in parts for flag in varied]
    groups = data.draw(st.lists(st.integers(0, len(joined.prompts) - 1), unique=True))
    chosen = select(joined, groups)
    assert responses(chosen) == [each[group * SAMPLES + i] for group in groups for i in range(SAMPLES)]
    assert len(chosen.held) == sum(owner == 0 for owner in chosen.owner.tolist())
    for name in ALL_COLUMNS:
        assert getattr(chosen, name).dtype == getattr(joined, name).dtype


@given(first=flags, later=st.lists(st.booleans(), min_size=40, max_size=40), max_rounds=st.integers(2, 5))
def test_a_batch_is_filled_with_the_first_groups_that_have_variance(
    first: list[bool], later: list[bool], max_rounds: int
) -> None:
    size, serial, asked, left = len(first), count(1), [], iter(later)

    def further(number: int, prompts: int) -> Rollout:
        # So many of those before had variance, and as many of these will; at least one, and a batch at most.
        before = [*first, *(flag for flags in asked for flag in flags)]
        full = max(sum(before), 1)
        wanted = min(size, math.ceil((size - sum(before)) * len(before) / full)) if any(before) else size
        assert number == len(asked) + 1 and prompts == wanted
        asked.append([next(left) for _ in range(prompts)])
        return make(asked[-1], serial)

    batch = make(first, serial)
    filled = fill(batch, further, max_rounds=max_rounds)
    varied = [*first, *(flag for flags in asked for flag in flags)]
    metrics = {key.removeprefix("rollout/dynamic/"): value for key, value in filled.metrics.items()}
    assert metrics["rounds"] == 1 + len(asked) <= max_rounds
    assert filled.sampled.has_variance.tolist() == varied
    # It stops at once when the batch is full, and not before.
    assert sum(varied) >= size or metrics["rounds"] == max_rounds
    assert not asked or sum(varied) - sum(asked[-1]) < size
    got = responses(filled.batch)
    everything = responses(filled.sampled)
    wanted = [i for i, flag in enumerate(varied) if flag][:size]
    wanted = sorted(wanted + [i for i, flag in enumerate(varied) if not flag][: size - len(wanted)])
    assert got == [everything[group * SAMPLES + i] for group in wanted for i in range(SAMPLES)]
    assert metrics["unfilled"] == max(0, size - sum(varied))
    assert bool(filled.unfilled) == (sum(varied) < size)
    if all(first):
        assert not asked and got == responses(batch)
    assert metrics["prompts_sampled"] == len(varied)
    assert len(varied) == size + metrics["groups_dropped"] + metrics["groups_surplus"]
    assert metrics["groups_dropped"] == varied.count(False) - metrics["unfilled"]
