"""Sequences on several ranks and packs of padding. Values and weights of every loss: test_definitions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from megatron_fspo.losses import DAPOLoss, GRPOLoss
from megatron_fspo.objective import (
    ConstantDualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
)
from megatron_fspo.objective.policy_objective import (
    LossInputs,
    LossTerms,
    PolicyObjective,
    SequenceLevel,
)

LENGTHS = [1, 3, 8, 20, 5, 40, 2, 12]

LOSSES: dict[str, PolicyObjective] = {
    "fspo": SequenceLevel(
        band=FSPOBand(c_low=0.05, c_high=0.08, drift=-0.001), dual_clip=LengthFairDualClip(c=0.15)
    ),
    "rloo": SequenceLevel(band=RLOOBand(eps_low=0.2, eps_high=0.2), dual_clip=ConstantDualClip(ratio=1.5)),
    "gspo": SequenceLevel(band=GSPOBand(eps_low=0.01, eps_high=0.02)),
    "grpo": GRPOLoss(eps_low=0.05, eps_high=0.05, dual_clip_ratio=1.1),
    "dapo": DAPOLoss(eps_low=0.05, eps_high=0.08),
}


def sums_of(mask: Tensor, segment: Tensor, sequences: int) -> Callable[[Tensor], Tensor]:
    """Per-sequence sums of [k, t] where every sequence is whole."""

    def sums(values: Tensor) -> Tensor:
        kept = torch.where(mask, values, 0.0)
        return values.new_zeros(len(values), sequences + 1).index_add_(1, segment, kept)[:, :-1]

    return sums


def prefix_sums_of(mask: Tensor, segment: Tensor) -> Callable[[Tensor], Tensor]:
    """Sums of [k, t] up to each token of its sequence, where every sequence is whole."""

    def sums(values: Tensor) -> Tensor:
        kept, prefix = torch.where(mask, values, 0.0), torch.zeros_like(values)
        for number in segment.unique():
            own = segment == number
            prefix[:, own] = kept[:, own].cumsum(1)
        return prefix

    return sums


def inputs(lengths: list[int], seed: int = 0) -> LossInputs:
    """A pack with prompts (outside the mask, NaN) before each response, and a tail that is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    segment, mask = [], []
    for number, length in enumerate(lengths):
        prompt = 1 + number % 3
        segment += [number] * (prompt + length)
        mask += [False] * prompt + [True] * length
    segment += [len(lengths)] * 4
    mask += [False] * 4
    where = torch.tensor(mask)
    ratio = torch.randn(len(mask), generator=generator, dtype=torch.float64) * 0.06
    ratio[~where] = float("nan")
    segments = torch.tensor(segment)
    n = len(lengths)
    log_probs = -torch.rand(len(mask), generator=generator, dtype=torch.float64) * 3
    log_probs[~where] = float("nan")
    return LossInputs(
        log_probs=log_probs,
        log_ratio=ratio,
        mask=where,
        segment=segments,
        sequence_sums=sums_of(where, segments, n),
        prefix_sums=prefix_sums_of(where, segments),
        lengths=torch.tensor(lengths),
        advantages=torch.randn(n, generator=generator, dtype=torch.float64),
        num_sequences=n,
        num_tokens=sum(lengths),
    )


def test_what_another_rank_decided_of_a_sequence_counts() -> None:
    """Where several ranks share it: S, weight, J, flags."""
    batch = inputs(LENGTHS)
    own = LOSSES["fspo"](batch)
    theirs = torch.linspace(1, 2, len(LENGTHS), dtype=torch.float64)
    nobody = torch.zeros_like(theirs)
    flags = [nobody, nobody + 1, nobody, nobody + 1, nobody]
    decided = torch.stack([theirs, 3 * theirs, 7 * theirs, 5 * theirs, *flags])
    got = LOSSES["fspo"](replace(batch, decided=lambda mine: decided + 0 * mine))
    assert torch.equal(got.log_ratio_sum, theirs) and torch.equal(got.ratio, 7 * theirs)
    want = torch.cat([3 * theirs, torch.zeros(1)])[batch.segment]
    assert torch.equal(got.weight, torch.where(batch.mask, want, 0.0))
    assert got.objective.item() == pytest.approx(5 * theirs.sum().item())
    flags = (got.clipped_low, got.clipped_high, got.dual_clipped, got.out_of_band, got.nonfinite)
    assert [[*map(bool, flag)] for flag in flags] == [
        [x] * len(LENGTHS) for x in (False, True, False, True, False)
    ]
    assert not torch.equal(own.weight, got.weight)


def part(batch: LossInputs, sequences: range) -> LossInputs:
    """Some sequences of a batch; N and T stay those of the whole step."""
    own = (batch.segment >= sequences.start) & (batch.segment < sequences.stop)
    kept = slice(sequences.start, sequences.stop)
    mask, segment = batch.mask[own], batch.segment[own] - sequences.start
    return replace(
        batch,
        log_probs=batch.log_probs[own],
        log_ratio=batch.log_ratio[own],
        mask=mask,
        segment=segment,
        sequence_sums=sums_of(mask, segment, len(sequences)),
        prefix_sums=prefix_sums_of(mask, segment),
        lengths=batch.lengths[kept],
        advantages=batch.advantages[kept],
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_sequence_on_two_ranks_counts_once(name: str) -> None:
    """Context parallel: each rank has some tokens; one reduction, and every per-sequence number is whole."""
    whole = inputs(LENGTHS)
    want = LOSSES[name](whole)
    first = torch.arange(len(whole.segment)) % 3 == 0
    box, barrier = [torch.empty(0), torch.empty(0)], Barrier(2, timeout=20)

    def rank(number: int) -> LossTerms:
        own = ~first if number else first
        mask, segment = whole.mask[own], whole.segment[own]
        local = sums_of(mask, segment, len(LENGTHS))
        calls = 0

        def reduced(values: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            assert calls == 1, "a second collective"
            box[number] = local(values)
            barrier.wait()
            return box[0] + box[1]

        ratio = whole.log_ratio[own]
        return LOSSES[name](
            replace(whole, log_ratio=ratio, mask=mask, segment=segment, sequence_sums=reduced)
        )

    with ThreadPoolExecutor(2) as pool:
        terms = list(pool.map(rank, range(2)))
    total = sum(t.objective.item() for t in terms)
    assert total == pytest.approx(want.objective.item(), abs=1e-9)
    for number, own in enumerate((first, ~first)):
        assert torch.allclose(terms[number].weight, want.weight[own], rtol=1e-9, atol=0)
        for field in ("log_ratio_sum", "clipped_low", "clipped_high", "dual_clipped", "out_of_band"):
            got = getattr(terms[number], field)
            assert torch.allclose(got.double(), getattr(want, field).double(), rtol=1e-9, atol=0), field


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_of_padding_only(name: str) -> None:
    terms: LossTerms = LOSSES[name](part(inputs(LENGTHS), range(0)))
    assert terms.objective == 0 and terms.weight.numel() == 0 and terms.nonfinite.numel() == 0
