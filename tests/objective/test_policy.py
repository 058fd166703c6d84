"""Every loss: against autograd through its own definition; on several ranks; on packs of padding."""

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

from megatron_fspo.losses import Definition, Loss, loss_sections
from megatron_fspo.losses.cispo import CISPOLoss
from megatron_fspo.losses.prefix import CPPOLoss, PNPOLoss
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token

LENGTHS = [1, 3, 8, 20, 5, 40, 2, 12]
LOSSES: dict[str, Loss] = {
    **{section.__name__: section() for section in loss_sections()},
    **{name: section(**keys) for section in loss_sections() for name, keys in section.VERIFIED.items()},
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
        loss_mask=where,
        segment=segments,
        sequence_sums=sums_of(where, segments, n),
        prefix_sums=prefix_sums_of(where, segments),
        lengths=torch.tensor(lengths),
        advantages=torch.randn(n, generator=generator, dtype=torch.float64),
        num_sequences=n,
        num_tokens=sum(lengths),
    )


def part(batch: LossInputs, sequences: range) -> LossInputs:
    """Some sequences of a batch; N and T stay those of the whole step."""
    own = (batch.segment >= sequences.start) & (batch.segment < sequences.stop)
    kept = slice(sequences.start, sequences.stop)
    mask, segment = batch.loss_mask[own], batch.segment[own] - sequences.start
    return replace(
        batch,
        log_probs=batch.log_probs[own],
        log_ratio=batch.log_ratio[own],
        loss_mask=mask,
        segment=segment,
        sequence_sums=sums_of(mask, segment, len(sequences)),
        prefix_sums=prefix_sums_of(mask, segment),
        lengths=batch.lengths[kept],
        advantages=batch.advantages[kept],
    )


def defined(loss: Loss, batch: LossInputs, log_ratio: Tensor) -> tuple[Tensor, list[Definition | None]]:
    """J of the whole batch and each response's definition, from log-ratios [t] with a graph."""
    total, responses = torch.zeros((), dtype=torch.float64), []
    for number, advantage in enumerate(batch.advantages.tolist()):
        own = batch.loss_mask & (batch.segment == number)
        if not own.any():
            responses.append(None)
            continue
        tokens = log_ratio[own]
        log_probs = batch.log_probs[own] + tokens - tokens.detach()
        one = loss.definition(tokens, advantage, log_probs)
        responses.append(one)
        if one.mean == "sequence":
            total = total + one.objective.mean() / batch.num_sequences
        else:
            total = total + one.objective.sum() / batch.num_tokens
    return total, responses


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**16), lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None)
def test_weights_are_the_derivative_of_the_definition(name: str, seed: int, lengths: list[int]) -> None:
    loss, batch = LOSSES[name], inputs(lengths, seed)
    batch = replace(batch, num_sequences=max(1, sum(n > 0 for n in lengths)), num_tokens=max(1, sum(lengths)))
    if seed % 3 == 0:
        batch.advantages[0] = 0.0
    variable = batch.log_ratio.clone().requires_grad_()
    want, responses = defined(loss, batch, variable)
    terms = loss.objective()(batch)
    assert terms.objective.item() / batch.num_sequences == pytest.approx(want.item(), rel=1e-9, abs=1e-12)
    if want.requires_grad:
        (gradient,) = torch.autograd.grad(want, variable)
        gradient = torch.where(batch.loss_mask, gradient, 0.0) * batch.num_sequences
        torch.testing.assert_close(terms.weight, gradient, rtol=1e-9, atol=1e-12)
    clipped = terms.clipped_low + terms.clipped_high + terms.dual_clipped
    for number, one in enumerate(responses):
        assert clipped[number].item() == pytest.approx(one.clipped if one else 0.0)
        assert bool(terms.out_of_band[number]) is (one is not None and one.out_of_band)
    assert not terms.nonfinite.any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_that_is_split_has_the_same_weights(name: str) -> None:
    objective = LOSSES[name].objective()
    for cut in (0, 3, len(LENGTHS)):
        whole = inputs(LENGTHS, cut)
        parts = [part(whole, range(cut)), part(whole, range(cut, len(LENGTHS)))]
        terms = [objective(one) for one in parts]
        want = objective(whole)
        assert sum(t.objective.item() for t in terms) == pytest.approx(want.objective.item(), abs=1e-9)
        weights = torch.cat([t.weight[p.loss_mask] for t, p in zip(terms, parts, strict=True)])
        torch.testing.assert_close(weights, want.weight[whole.loss_mask], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_finite_drops_its_response_and_no_other(name: str, value: float) -> None:
    objective, good = LOSSES[name].objective(), inputs(LENGTHS)
    ratio = good.log_ratio.clone()
    ratio[int((good.segment == 2).nonzero()[-1])] = value
    terms = objective(replace(good, log_ratio=ratio))
    assert terms.nonfinite.tolist() == [i == 2 for i in range(len(LENGTHS))]
    assert (terms.weight[good.segment == 2] == 0).all() and terms.objective.isfinite()
    others = good.segment != 2
    assert torch.equal(terms.weight[others], objective(good).weight[others])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ratios_far_away_are_weighed_or_dropped_and_never_nan(name: str, sign: float) -> None:
    """A log-ratio of 60 on every token: e^S overflows float64 for the longer ones."""
    batch = inputs(LENGTHS)
    terms = LOSSES[name].objective()(replace(batch, log_ratio=torch.full_like(batch.log_ratio, 60 * sign)))
    assert terms.weight.isfinite().all() and terms.objective.isfinite()
    assert not terms.weight[~batch.loss_mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_without_any_response_has_no_gradient(name: str) -> None:
    terms = LOSSES[name].objective()(replace(inputs([0, 0]), num_sequences=0, num_tokens=0))
    assert not terms.weight.any() and terms.objective == 0 and not terms.nonfinite.any()
    terms = LOSSES[name].objective()(part(inputs(LENGTHS), range(0)))  # of a micro-batch of padding only
    assert terms.objective == 0 and terms.weight.numel() == 0 and terms.nonfinite.numel() == 0


def test_on_policy_no_loss_clips_and_all_have_gradients() -> None:
    """At S = 0."""
    batch = inputs(LENGTHS)
    batch = replace(batch, log_ratio=torch.zeros_like(batch.log_ratio))
    for loss in LOSSES.values():
        if getattr(loss, "drift", "none") != "none":
            continue
        terms = loss.objective()(batch)
        a = torch.cat([batch.advantages, torch.zeros(1)])[batch.segment]
        assert torch.equal(terms.weight.sign(), torch.where(batch.loss_mask, a, 0.0).sign()), loss
        assert not (terms.clipped_low + terms.clipped_high + terms.dual_clipped).any()


@pytest.mark.parametrize("eps_low", [None, 0.03])
def test_what_cispo_clips_keeps_its_gradient(eps_low: float | None) -> None:
    batch = inputs(LENGTHS)
    terms = CISPOLoss(eps_low=eps_low, eps_high=0.04).objective()(batch)
    assert terms.clipped_high.any() and bool(terms.clipped_low.any()) == (eps_low is not None)
    assert (terms.weight[batch.loss_mask] != 0).all()
    assert terms.ratio.isnan().all(), "tokens have weights of their own"


# Several ranks.


def test_what_another_rank_decided_of_a_sequence_counts() -> None:
    """Where several ranks share it: S, weight, J, flags."""
    batch = inputs(LENGTHS)
    own = LOSSES["fspo"].objective()(batch)
    theirs = torch.linspace(1, 2, len(LENGTHS), dtype=torch.float64)
    nobody = torch.zeros_like(theirs)
    flags = [nobody, nobody + 1, nobody, nobody + 1, nobody, nobody]
    decided = torch.stack([theirs, 3 * theirs, 7 * theirs, 5 * theirs, *flags])
    got = LOSSES["fspo"].objective()(replace(batch, decided=lambda mine: decided + 0 * mine))
    assert torch.equal(got.log_ratio_sum, theirs) and torch.equal(got.ratio, 7 * theirs)
    want = torch.cat([3 * theirs, torch.zeros(1)])[batch.segment]
    assert torch.equal(got.weight, torch.where(batch.loss_mask, want, 0.0))
    assert got.objective.item() == pytest.approx(5 * theirs.sum().item())
    sides = (got.clipped_low, got.clipped_high, got.dual_clipped, got.below, got.out_of_band, got.nonfinite)
    assert [[*map(bool, flag)] for flag in sides] == [
        [x] * len(LENGTHS) for x in (False, True, False, True, True, False)
    ]
    assert not torch.equal(own.weight, got.weight)


@pytest.mark.parametrize("name", ["fspo-dual", "rloo", "gspo", "grpo", "dapo"])
def test_a_sequence_on_two_ranks_counts_once(name: str) -> None:
    """Context parallel: each rank has some tokens; one reduction, and every per-sequence number is whole."""
    whole = inputs(LENGTHS)
    want = LOSSES[name].objective()(whole)
    first = torch.arange(len(whole.segment)) % 3 == 0
    box, barrier = [torch.empty(0), torch.empty(0)], Barrier(2, timeout=20)

    def rank(number: int) -> LossTerms:
        own = ~first if number else first
        mask, segment = whole.loss_mask[own], whole.segment[own]
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
        return LOSSES[name].objective()(
            replace(whole, log_ratio=ratio, loss_mask=mask, segment=segment, sequence_sums=reduced)
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


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_prefix_losses_by_hand(advantage: float) -> None:
    """Three tokens of probability ½ whose ratios are 1.4, 0.9 and 1.2."""
    old = torch.full((3,), 0.5, dtype=torch.float64).log()
    ratio = torch.tensor([1.4, 0.9, 1.2], dtype=torch.float64)
    batch = replace(
        inputs([3]),
        log_ratio=ratio.log(),
        log_probs=old + ratio.log(),
        loss_mask=torch.ones(3, dtype=torch.bool),
        segment=torch.zeros(3, dtype=torch.int64),
        advantages=torch.tensor([advantage]),
        num_sequences=1,
        num_tokens=1,
    )
    batch = replace(
        batch,
        sequence_sums=sums_of(batch.loss_mask, batch.segment, 1),
        prefix_sums=prefix_sums_of(batch.loss_mask, batch.segment),
    )
    # CPPO: w = 1, .75, .5; moved .2, .0375, .05; room for it .19, .09 and .1275.
    cppo = CPPOLoss(delta=0.19, budget=0.1, last_weight=0.5)(batch)
    first, last = (0.0, 1.2) if advantage > 0 else (1.4, 1.2)
    assert cppo.weight.tolist() == pytest.approx([first * advantage, 0.9 * advantage, last * advantage])
    strict = CPPOLoss(delta=0.19, budget=0.01, last_weight=0.5)(batch)  # third: .05 > .19 + .0175 - .2375
    assert strict.weight[2].item() == (0.0 if advantage > 0 else pytest.approx(-1.2))
    # PNPO: means 1.4, √1.26 = 1.1225, ∛1.512 = 1.1478.
    pnpo = PNPOLoss(eps_low=0.1, eps_high=0.13)(batch)
    assert pnpo.weight.tolist() == pytest.approx([0.0, 1.1224972 * advantage, 0.0])
    assert (pnpo.clipped_low + pnpo.clipped_high).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("seed", range(6))
def test_a_cppo_tokens_reach_is_the_factor_at_which_it_is_clipped(seed: int) -> None:
    """At every factor of both limits, by the weights and by the definition; only where A pushes."""
    batch = inputs(LENGTHS, seed)
    loss = CPPOLoss(delta=0.01, budget=0.002, last_weight=0.6)
    advantages = per_token(batch.advantages, batch)
    pushed = batch.loss_mask & (batch.log_ratio * advantages > 0)
    reach = loss.token_reach(batch)
    assert pushed.sum() > 20 and reach[pushed].max() > 3 * reach[pushed].min()
    for share in (0.05, 0.3, 0.5, 0.7, 0.95):
        middle = reach[pushed].quantile(share).item()
        for factor in (middle * (1 - 1e-9), middle * (1 + 1e-9)):
            scaled = loss.scaled(factor)
            clipped = scaled(batch).weight == 0
            assert torch.equal(clipped[pushed], (reach > factor)[pushed])
            assert not clipped[batch.loss_mask & ~pushed & (advantages != 0)].any(), "the other direction"
            for number, one in enumerate(defined(scaled, batch, batch.log_ratio)[1]):
                own = batch.loss_mask & (batch.segment == number)
                if one is not None:
                    assert one.clipped == pytest.approx(clipped[own].double().mean().item())
