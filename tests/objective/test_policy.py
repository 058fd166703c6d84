"""One weight per token from every loss: against autograd of the loss as one would write it down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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
    TokenLevel,
)

LENGTHS = [1, 3, 8, 20, 5, 40, 2, 12]

LOSSES: dict[str, PolicyObjective] = {
    "fspo": SequenceLevel(
        band=FSPOBand(c_low=0.05, c_high=0.08, drift=-0.001), dual_clip=LengthFairDualClip(c=0.15)
    ),
    "rloo": SequenceLevel(band=RLOOBand(eps_low=0.2, eps_high=0.2), dual_clip=ConstantDualClip(ratio=1.5)),
    "gspo": SequenceLevel(band=GSPOBand(eps_low=0.01, eps_high=0.02)),
    "grpo": TokenLevel(eps_low=0.05, eps_high=0.05, aggregation="sequence-mean", dual_clip_ratio=1.1),
    "dapo": TokenLevel(eps_low=0.05, eps_high=0.08, aggregation="token-mean"),
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
        kept, found = torch.where(mask, values, 0.0), torch.zeros_like(values)
        for number in segment.unique():
            own = segment == number
            found[:, own] = kept[:, own].cumsum(1)
        return found

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


def written_down(name: str, batch: LossInputs, log_ratio: Tensor) -> Tensor:
    """J of the whole batch from per-token log-ratios, sequence by sequence, by min and max."""
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(batch.lengths.tolist()):
        tokens = log_ratio[batch.mask & (batch.segment == i)]
        a, root = batch.advantages[i], length**0.5
        if name in ("grpo", "dapo"):
            high = 1.05 if name == "grpo" else 1.08
            ratio = tokens.exp()
            j = torch.minimum(ratio * a, ratio.clamp(0.95, high) * a)
            if name == "grpo" and a < 0:
                j = torch.maximum(j, 1.1 * a)
            total = total + (j.mean() / batch.num_sequences if name == "grpo" else j.sum() / batch.num_tokens)
            continue
        s = tokens.sum()
        low, high, bound = {
            "fspo": (-0.05 * root - 0.001 * length, 0.08 * root - 0.001 * length, 0.15 * root),
            "rloo": (float(torch.tensor(0.8).double().log()), float(torch.tensor(1.2).double().log()), None),
            "gspo": (0.0, 0.0, None),
        }[name]
        if name == "gspo":
            ratio = (s / length).exp()
            j = torch.minimum(ratio * a, ratio.clamp(0.99, 1.02) * a)
        else:
            j = torch.minimum(s.exp() * a, s.clamp(low, high).exp() * a)
            limit = torch.tensor(1.5).double() if name == "rloo" else torch.tensor(bound).double().exp()
            if a < 0:
                j = torch.maximum(j, limit * a)
        total = total + j / batch.num_sequences
    return total


def test_what_another_rank_decided_of_a_sequence_counts() -> None:
    """Where several ranks share it: S, weight, J, flags."""
    batch = inputs(LENGTHS)
    own = LOSSES["fspo"](batch)
    theirs = torch.linspace(1, 2, len(LENGTHS), dtype=torch.float64)
    nobody = torch.zeros_like(theirs)
    flags = [nobody, nobody + 1, nobody, nobody + 1, nobody]
    told = torch.stack([theirs, 3 * theirs, 7 * theirs, 5 * theirs, *flags])
    got = LOSSES["fspo"](replace(batch, decided=lambda mine: told + 0 * mine))
    assert torch.equal(got.log_ratio_sum, theirs) and torch.equal(got.ratio, 7 * theirs)
    want = torch.cat([3 * theirs, torch.zeros(1)])[batch.segment]
    assert torch.equal(got.weight, torch.where(batch.mask, want, 0.0))
    assert got.objective.item() == pytest.approx(5 * theirs.sum().item())
    flags = (got.clipped_low, got.clipped_high, got.dual_clipped, got.out_of_band, got.nonfinite)
    assert [[*map(bool, flag)] for flag in flags] == [
        [x] * len(LENGTHS) for x in (False, True, False, True, False)
    ]
    assert not torch.equal(own.weight, got.weight)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_weights_are_those_of_the_loss_written_down(name: str) -> None:
    clipped = 0
    for seed in range(5):
        batch = inputs(LENGTHS, seed)
        terms = LOSSES[name](batch)
        variable = batch.log_ratio.clone().requires_grad_()
        want = written_down(name, batch, variable)
        (gradient,) = torch.autograd.grad(want, variable)
        assert terms.objective.item() / batch.num_sequences == pytest.approx(want.item(), abs=1e-6)
        got = terms.weight / batch.num_sequences
        assert torch.allclose(got[batch.mask], gradient[batch.mask], atol=1e-7)
        assert (got[~batch.mask] == 0).all()
        assert not terms.nonfinite.any()
        clipped += int((terms.clipped_low + terms.clipped_high + terms.dual_clipped > 0).sum())
    assert 0 < clipped < 5 * len(LENGTHS)


@pytest.mark.parametrize("name", LOSSES)
@given(cut=st.integers(0, len(LENGTHS)), seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_a_split_into_micro_batches_changes_nothing(name: str, cut: int, seed: int) -> None:
    whole = inputs(LENGTHS, seed)
    parts = [part(whole, range(cut)), part(whole, range(cut, len(LENGTHS)))]
    terms = [LOSSES[name](p) for p in parts]
    want = LOSSES[name](whole)
    assert sum(t.objective.item() for t in terms) == pytest.approx(want.objective.item(), abs=1e-9)
    weights = torch.cat([t.weight[p.mask] for t, p in zip(terms, parts, strict=True)])
    assert torch.allclose(weights, want.weight[whole.mask])


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_finite_drops_its_sequence_and_no_other(name: str, value: float) -> None:
    good = inputs(LENGTHS)
    ratio = good.log_ratio.clone()
    ratio[int((good.segment == 2).nonzero()[-1])] = value
    terms = LOSSES[name](replace(good, log_ratio=ratio))
    assert terms.nonfinite.tolist() == [i == 2 for i in range(len(LENGTHS))]
    assert (terms.weight[good.segment == 2] == 0).all() and terms.weight.isfinite().all()
    assert terms.objective.isfinite()
    others = good.segment != 2
    assert torch.equal(terms.weight[others], LOSSES[name](good).weight[others])


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_without_any_response_has_no_gradient(name: str) -> None:
    batch = replace(inputs([0, 0]), num_sequences=0, num_tokens=0)
    terms = LOSSES[name](batch)
    assert not terms.weight.any() and terms.objective == 0 and not terms.nonfinite.any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_of_padding_only(name: str) -> None:
    terms: LossTerms = LOSSES[name](part(inputs(LENGTHS), range(0)))
    assert terms.objective == 0 and terms.weight.numel() == 0 and terms.nonfinite.numel() == 0
