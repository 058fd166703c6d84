"""Value, weights and flags of every loss against autograd through its own definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy import LENGTHS, inputs, part
from torch import Tensor

from megatron_fspo.losses import Definition, Loss, loss_sections
from megatron_fspo.losses.cispo import CISPOLoss
from megatron_fspo.objective.policy_objective import LossInputs

LOSSES: dict[str, Loss] = {
    **{section.__name__: section() for section in loss_sections()},
    **{name: section(**keys) for section in loss_sections() for name, keys in section.VERIFIED.items()},
}


def defined(loss: Loss, batch: LossInputs, log_ratio: Tensor) -> tuple[Tensor, list[Definition | None]]:
    """J of the whole batch and each response's definition, from log-ratios [t] with a graph."""
    total, responses = torch.zeros((), dtype=torch.float64), []
    for number, advantage in enumerate(batch.advantages.tolist()):
        own = batch.mask & (batch.segment == number)
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
        gradient = torch.where(batch.mask, gradient, 0.0) * batch.num_sequences
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
        weights = torch.cat([t.weight[p.mask] for t, p in zip(terms, parts, strict=True)])
        torch.testing.assert_close(weights, want.weight[whole.mask], rtol=1e-9, atol=1e-12)


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
    assert not terms.weight[~batch.mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_without_any_response_has_no_gradient(name: str) -> None:
    terms = LOSSES[name].objective()(replace(inputs([0, 0]), num_sequences=0, num_tokens=0))
    assert not terms.weight.any() and terms.objective == 0 and not terms.nonfinite.any()


def test_on_policy_no_loss_clips_and_all_have_gradients() -> None:
    """At S = 0."""
    batch = inputs(LENGTHS)
    batch = replace(batch, log_ratio=torch.zeros_like(batch.log_ratio))
    for loss in LOSSES.values():
        if getattr(loss, "drift", "none") != "none":
            continue
        terms = loss.objective()(batch)
        a = torch.cat([batch.advantages, torch.zeros(1)])[batch.segment]
        assert torch.equal(terms.weight.sign(), torch.where(batch.mask, a, 0.0).sign()), loss
        assert not (terms.clipped_low + terms.clipped_high + terms.dual_clipped).any()


@pytest.mark.parametrize("eps_low", [None, 0.03])
def test_what_cispo_clips_keeps_its_gradient(eps_low: float | None) -> None:
    batch = inputs(LENGTHS)
    terms = CISPOLoss(eps_low=eps_low, eps_high=0.04).objective()(batch)
    assert terms.clipped_high.any() and bool(terms.clipped_low.any()) == (eps_low is not None)
    assert (terms.weight[batch.mask] != 0).all()
    assert terms.ratio.isnan().all(), "tokens have weights of their own"
