"""From the mismatch to gradient weights: the same for every split, and only where they belong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch import found_by
from megatron_fspo.config.correction import IcePop, LengthFairGate, SequenceMask, SequenceTIS, TokenTIS
from megatron_fspo.losses import DAPOLoss, GRPOLoss
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.objective import FSPOBand
from megatron_fspo.objective.surrogate import PolicyObjective, SequenceLevel
from megatron_fspo.packing.batch import MicroBatch, MicroBatches
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.record.records import Recorder
from megatron_fspo.trainer.correction import Rule, compute_weights, correct, effective_share, little_is_left
from megatron_fspo.trainer.mismatch import measure
from mismatch_cases import ALONE, LENGTHS, PACKS, packed, responses

GROUPS = ParallelGroups(tp=ALONE, pp=ALONE, cp=ALONE, ep=ALONE, edp=ALONE, dp=ALONE, dp_cp=ALONE)
# Σ Δ of the responses of 1, 9, 30, 0 and 4 tokens.
SUMS = [0.1, -0.4, 1.2, 0.0, -1.0]
DELTAS = [
    torch.linspace(-0.5, 0.5, n, dtype=torch.float64) + s / max(n, 1)
    if n > 1
    else torch.full((n,), s).double()
    for n, s in zip(LENGTHS, SUMS, strict=True)
]

WEIGHTS: dict[str, tuple[Rule, Callable[[int], Tensor]]] = {
    "token_tis": (TokenTIS(cap=1.25), lambda i: DELTAS[i].exp().clamp(max=1.25)),
    "icepop": (
        IcePop(low=0.8, high=1.25),
        lambda i: torch.where((DELTAS[i].exp() - 1.025).abs() < 0.225, DELTAS[i].exp(), 0.0),
    ),
    "sequence_tis": (SequenceTIS(cap=2.0), lambda i: torch.tensor(min(math.exp(SUMS[i]), 2.0))),
    "sequence_mask": (SequenceMask(low=0.5, high=2.0), lambda i: torch.tensor(float(abs(SUMS[i]) < 0.69))),
    # Limits .2, .6, 1.095, 0 and .4
    "length_fair_gate": (LengthFairGate(c=0.2), lambda i: torch.tensor(float(i in (0, 1, 3)))),
}


def corrected(
    correction: Rule,
    packs: list[list[int]],
    deltas: list[Tensor] = DELTAS,
    broken: float | None = None,
) -> tuple[MicroBatches, dict[str, float]]:
    """``broken``: the sampler's log-prob of a token of response 1."""
    samples, _ = responses()
    batches = packed(samples, deltas, packs)
    if broken is not None:
        sampled = [batch.sampled_log_probs.clone() for batch in batches]
        for batch, log_probs in zip(batches, sampled, strict=True):
            log_probs[(batch.loss_mask & (batch.sample_index == 1)[batch.segment]).nonzero()[3]] = broken
        batches = batches.with_columns(sampled_log_probs=sampled)
    return correct(correction, batches, measure(batches, len(samples), group=ALONE), groups=GROUPS)


@pytest.mark.parametrize("packs", PACKS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_token_gets_the_weight_of_its_rule_in_every_split(name: str, packs: list[list[int]]) -> None:
    correction, weight = WEIGHTS[name]
    batches, metrics = corrected(correction, packs)
    for batch in batches:
        assert batch.rollout_weights is not None
        assert (batch.rollout_weights[~batch.loss_mask] == 0).all()
        for number, index in enumerate(batch.sample_index.tolist()):
            here = batch.loss_mask & (batch.segment == number)
            want = weight(index).double().expand(LENGTHS[index])
            assert torch.allclose(batch.rollout_weights[here], want, atol=1e-7)
    assert metrics == pytest.approx(corrected(correction, PACKS[0])[1], rel=1e-12)


def test_metrics_by_hand() -> None:
    """Responses of 1 and 4 tokens are the shorter half of the four, 9 and 30 the longer."""
    _, got = corrected(SequenceMask(), PACKS[1])
    assert got == {
        "rollout/correction_dropped": 2 / 4,
        "rollout/correction_dropped/short": 1 / 2,
        "rollout/correction_dropped/long": 1 / 2,
        "rollout/correction_weight_mean": 2 / 4,
        "rollout/correction_ess": 2 / 4,  # of weights 0 and 1 it is the share of ones
    }
    _, got = corrected(SequenceTIS(cap=2.0), PACKS[1])
    weights = [math.exp(0.1), math.exp(-0.4), 2, math.exp(-1)]
    assert got == pytest.approx(
        {
            "rollout/correction_truncated_sequences": 1 / 4,
            "rollout/correction_truncated_sequences/short": 0,
            "rollout/correction_truncated_sequences/long": 1 / 2,
            "rollout/correction_weight_mean": sum(weights) / 4,
            "rollout/correction_ess": sum(weights) ** 2 / (4 * sum(w * w for w in weights)),
        }
    )
    _, got = corrected(TokenTIS(cap=1.25), PACKS[1])
    tokens = torch.cat(DELTAS)
    weight = tokens.exp().clamp(max=1.25)
    at_cap = [(delta.exp() > 1.25).sum().item() for delta in DELTAS]
    assert 0 < at_cap[2] < 30 and 0 < at_cap[1] < 9
    assert got == pytest.approx(
        {
            "rollout/correction_truncated_tokens": sum(at_cap) / 44,
            "rollout/correction_truncated_tokens/short": (at_cap[0] + at_cap[4]) / 5,
            "rollout/correction_truncated_tokens/long": (at_cap[1] + at_cap[2]) / 39,
            "rollout/correction_weight_mean": weight.mean().item(),
            "rollout/correction_ess": (weight.mean() ** 2 / weight.square().mean()).item(),
        }
    )


def of_noise(spread: float, length: int) -> tuple[float, float]:
    """Mean weight and effective share of ``sequence_tis`` where noise gives Σ Δ this spread.

    Its mean is -spread²/2: over what the sampler samples, exp(Σ Δ) has the mean 1.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400_000, generator=generator, dtype=torch.float64)
    sums = noise * spread - spread**2 / 2
    weight, _ = compute_weights(SequenceTIS(cap=2.0), sums, torch.full_like(sums, length))
    count = torch.tensor(len(weight))
    return weight.mean().item(), effective_share(weight.sum(), weight.square().sum(), count)


def test_the_weight_that_noise_alone_leaves_to_long_responses() -> None:
    """At 0.0138 nats per token (mean |Δ| 0.011)."""
    short, long = (of_noise(0.0138 * math.sqrt(length), length) for length in (1000, 16_000))
    assert short[0] > 0.95 and long == pytest.approx((0.52, 0.40), abs=0.01)


def test_an_effective_share_by_hand() -> None:
    def share(*weights: float) -> float:
        weight = torch.tensor(weights, dtype=torch.float64)
        return effective_share(weight.sum(), weight.square().sum(), torch.tensor(len(weights)))

    assert share(0.1, 0.1, 0.1) == pytest.approx(1)
    assert share(1, 2) == pytest.approx(9 / 10)
    assert share(0, 0) == 0 and math.isnan(share())


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_rule_that_leaves_little_is_told_with_its_remedy(name: str) -> None:
    metrics = {"rollout/correction_weight_mean": 0.3, "rollout/correction_ess": 0.8}
    metrics |= {"rollout/mismatch_sigma": 0.0138, "rollout/mismatch_outliers": 0.01}
    text = little_is_left(WEIGHTS[name][0], metrics) or ""
    assert re.search(rf"correction.name = {name} .* 0.3 .* 80% .* 0.014, .* 1.0%", text)
    assert ("correction.c = 0.055" in text) == (name not in ("token_tis", "icepop"))
    assert "40%" in (little_is_left(WEIGHTS[name][0], metrics | {"rollout/correction_ess": 0.4}) or "")
    for enough in (0.5, math.nan):  # NaN: nothing was in a pack
        ends = {"rollout/correction_weight_mean": enough, "rollout/correction_ess": enough}
        assert little_is_left(WEIGHTS[name][0], metrics | ends) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_response_whose_difference_is_not_finite_is_dropped_as_such(name: str, value: float) -> None:
    (batch,), metrics = corrected(WEIGHTS[name][0], PACKS[0], broken=value)
    loss = Loss(SequenceLevel(band=FSPOBand(c_low=1.0, c_high=1.0)), batch)
    assert [record.nonfinite for record in loss.records] == [False, True, False, False, False]
    assert loss.gradient.isfinite().all() and (loss.gradient[batch.segment == 1] == 0).all()
    # It counts in no metric of the correction.
    left = [WEIGHTS[name][1](i).double() for i in (0, 2, 4)]
    if name in ("token_tis", "icepop"):
        left = [torch.cat(left)]
    want = torch.stack(left).mean().item()
    assert metrics["rollout/correction_weight_mean"] == pytest.approx(want)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_rollout_with_nothing_in_packs_has_no_figures(name: str) -> None:
    """Response 3 is empty."""
    _, metrics = corrected(WEIGHTS[name][0], [[3]])
    assert metrics and all(math.isnan(value) for value in metrics.values())


class GivenScores:
    """In place of a model: log-probs and entropies as leaves, to see what gradient each gets."""

    groups = SimpleNamespace(cp=ALONE)

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs.clone().requires_grad_()
        self.entropy = torch.ones_like(log_probs).requires_grad_()

    def __call__(self, *_: object) -> tuple[Tensor, Tensor]:
        return self.log_probs, self.entropy


class Loss:
    """One micro-batch through PolicyLoss, with S = 0.1 everywhere."""

    def __init__(self, objective: PolicyObjective, batch: MicroBatch, **coefficients: float) -> None:
        assert batch.old_log_probs is not None
        scores = torch.full(batch.loss_mask.shape, -1.4, dtype=torch.float64)
        old = torch.where(batch.old_log_probs.isfinite() | ~batch.loss_mask, -1.41, batch.old_log_probs)
        batch = replace(batch, old_log_probs=old, reference_log_probs=scores - 0.3)
        scoring: Any = GivenScores(scores)
        recorder = Recorder(1)
        loss = PolicyLoss(
            objective=objective,
            scoring=scoring,
            observer=recorder,
            **coefficients,
        )
        value, _, self.metrics = loss.loss(batch, torch.nn.Identity(), torch.empty(0))
        self.records = recorder.records(0)
        value.backward()
        self.gradient = scoring.log_probs.grad
        self.entropy_gradient = scoring.entropy.grad


OBJECTIVES: dict[str, PolicyObjective] = {
    "sequence": SequenceLevel(band=FSPOBand(c_low=0.03, c_high=0.03)),  # A > 0 and L = 30: S = .3 is clipped
    "sequence-mean": GRPOLoss(),
    "token-mean": DAPOLoss(eps_high=0.2),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_policy_gradient_is_weighted_and_nothing_else(name: str, objective: PolicyObjective) -> None:
    (batch,), _ = corrected(WEIGHTS[name][0], PACKS[0])
    assert batch.rollout_weights is not None
    # What is outside the mask must not matter.
    batch = replace(batch, rollout_weights=torch.where(batch.loss_mask, batch.rollout_weights, math.nan))
    plain = replace(batch, rollout_weights=None)
    alone, weighted = Loss(objective, plain), Loss(objective, batch)
    here = batch.loss_mask
    assert torch.allclose(weighted.gradient[here], (alone.gradient * batch.rollout_weights)[here], atol=1e-12)
    assert (weighted.gradient[~here] == 0).all() and not torch.equal(weighted.gradient, alone.gradient)
    # S, clips, the reported loss and every other metric are those without the correction.
    assert weighted.records == alone.records
    for key, pair in alone.metrics.items():
        assert torch.equal(weighted.metrics[key], pair), key
    # Entropy and KL add the same gradient with the correction as without.
    extra = {"entropy_coef": 0.3, "kl_coef": 0.2}
    more, weighted_more = Loss(objective, plain, **extra), Loss(objective, batch, **extra)
    kl = more.gradient - alone.gradient
    assert torch.allclose(weighted_more.gradient - weighted.gradient, kl) and kl.abs().max() > 1e-3
    assert torch.equal(weighted_more.entropy_gradient, more.entropy_gradient)
    assert more.entropy_gradient.abs().max() > 0


def test_a_dropped_sequence_stays_in_n() -> None:
    """What the others learn from does not grow because one was dropped."""
    deltas = [delta.clone() for delta in DELTAS]
    deltas[2] += 10.0
    (all_kept,), _ = corrected(LengthFairGate(c=1e3), PACKS[0], deltas)
    (one_dropped,), metrics = corrected(LengthFairGate(c=1.0), PACKS[0], deltas)
    assert metrics["rollout/correction_dropped"] == 1 / 4
    objective = SequenceLevel(band=FSPOBand(c_low=1.0, c_high=1.0))
    kept, dropped = Loss(objective, all_kept).gradient, Loss(objective, one_dropped).gradient
    others = all_kept.segment != 2
    assert torch.equal(dropped[others], kept[others]) and (dropped[~others] == 0).all()
    assert (kept[~others] != 0).any()


def test_ranks_that_share_a_model_correct_alike(tmp_path: Path) -> None:
    """Though a sum that differs in its last bits lies on either side of the limit."""
    found = found_by(Path(__file__).with_name("correction_worker.py"), tmp_path, nproc=2)
    assert set(found) == {"sequence_tis", "sequence_mask", "length_fair_gate"}
    for first, second in found.values():
        assert first == second and sum(map(len, first[0])) > sum(LENGTHS)
