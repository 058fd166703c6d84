"""The band at the lengths of long reasoning: S has the mean −σ²L/2 there, and so has the band's centre."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_fspo.losses import FSPOLoss
from megatron_fspo.losses.fspo import FSPOState
from megatron_fspo.objective.fairness import length_bins

UPDATES = 3
"""Off-policy optimizer steps of a rollout; S grows with each."""


def rollout(sigma: float, longest: int, seed: int, size: int = 1024) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Optimizer step, S and L of responses sampled by the old policy: E[e^S] = 1 at every length."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(UPDATES):
        lengths = (30 * (longest / 30) ** torch.rand(size, generator=generator, dtype=torch.float64)).long()
        spread = sigma * (0.7 + 0.3 * step)
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        yield 2 + step, spread * lengths.sqrt() * noise - spread**2 / 2 * lengths, lengths


def trained(loss: FSPOLoss, sigma: float, longest: int, rollouts: int = 8) -> FSPOState:
    state = loss.start(longest=longest, updates=UPDATES, rollouts=rollouts)
    for number in range(rollouts):
        for step, sums, lengths in rollout(sigma, longest, number):
            state.observe(sums, lengths, update=step, warm=True)
    return state


def sides(state: FSPOState, sigma: float, longest: int) -> tuple[Tensor, Tensor]:
    """Shares below and above the band [bins], over length bins up to ``longest``."""
    steps = [list(rollout(sigma, longest, 100 + n, size=32_768)) for n in range(2)]
    bands = {step: state.section(update=step).band() for step, _, _ in steps[0]}
    every = [(s, n, *bands[step].bounds(n)) for one in steps for step, s, n in one]
    sums, lengths, low, high = (torch.cat(column) for column in zip(*every, strict=True))
    bins = length_bins(lengths, 8)
    counts = bins.bincount()
    return bins[sums < low].bincount(minlength=8) / counts, bins[sums > high].bincount(minlength=8) / counts


@pytest.mark.parametrize("exponent", [0.6, 0.7, 1.0])
def test_the_centre_of_a_band_with_another_exponent(exponent: float) -> None:
    """It is limited in σ's unit, nats per √token, not in that of c, which is smaller by L^(exponent − ½)."""
    half, other = (trained(FSPOLoss(exponent=a), 0.022, 8000).metrics() for a in (0.5, exponent))
    assert other["fspo/c_low"] < half["fspo/c_low"] / 1.5
    assert other["fspo/drift"] == pytest.approx(half["fspo/drift"], rel=0.1) and half["fspo/drift"] < 0


@pytest.mark.parametrize("sigma", [0.01, 0.022, 0.04])
def test_long_and_short_responses_lie_outside_alike_on_both_sides(sigma: float) -> None:
    """c comes from 30 to 8,000 tokens and holds up to 32,000, without a word in the configuration."""
    state = trained(FSPOLoss(), sigma, 8000)
    for longest in (8000, 32_000):
        below, above = sides(state, sigma, longest)
        for share in (*below, *above):
            for other in (below[0], above[0]):
                assert 1 / 1.5 < share / other < 1.5
        one_sided = trained(FSPOLoss(drift="none"), sigma, 8000)
        below, above = sides(one_sided, sigma, longest)
        assert below[-1] > 2 * above[-1]  # as it was


def test_where_responses_are_short_nothing_changes() -> None:
    """σ√L up to 0.4: the drift is below a tenth of the half width, and c, band and state are as without."""
    auto, none = (trained(FSPOLoss(drift=drift), 0.01, 400) for drift in ("auto", "none"))
    assert auto.objective() == none.objective()
    assert auto.metrics() == none.metrics() and auto.metrics()["fspo/drift"] == 0
    assert auto.state_dict()["calibrator"] == none.state_dict()["calibrator"]


def test_the_first_rollout_says_nothing() -> None:
    """Adam's first updates: of two rollouts the smaller σ̂ counts."""
    state = FSPOLoss(calibrate=0, c_low=0.04, c_high=0.04).start(longest=8000)
    for sigma, drift in ((0.2, 0.0), (0.02, 0.02), (0.03, 0.03)):
        for step, sums, lengths in rollout(sigma, 8000, 1):
            state.observe(sums, lengths, update=step, warm=True)
        assert state.section(update=3).band().drift == pytest.approx(-(drift**2) / 2, rel=0.2)


def test_the_centre_follows_the_optimizer_step_and_stops_where_c_no_longer_fits() -> None:
    state = trained(FSPOLoss(recalibrate=False), 0.02, 8000)
    first, last = (state.section(update=step).band().drift for step in (2, 4))
    assert first == pytest.approx(-(0.014**2) / 2, rel=0.1)
    assert last == pytest.approx(-(0.026**2) / 2, rel=0.1)
    assert state.section(update=9).band().drift == last  # a step that no rollout had
    assert state.section(on_policy=True).band().drift == 0  # S = 0
    c = state.metrics()["fspo/c_low"]
    for number in range(8):  # σ grows threefold: c is fixed, and the centre stops at σ̂ = c
        for step, sums, lengths in rollout(0.06, 8000, number):
            state.observe(sums, lengths, update=step, warm=True)
    assert state.metrics()["fspo/c_low"] == c
    assert state.metrics()["fspo/drift"] == pytest.approx(-(c**2) / 2)


def test_a_second_epoch_has_the_drift_of_the_first() -> None:
    """Its responses were trained on: S spreads by what was learned from them, and has no such mean."""
    state = FSPOLoss().start(longest=8000, updates=2 * UPDATES, rollouts=8)
    for number in range(8):
        for step, sums, lengths in rollout(0.02, 8000, number):
            state.observe(sums, lengths, update=step, warm=True)
        for step, sums, lengths in rollout(0.06, 8000, 50 + number):
            trained_on = sums + 0.0018 * lengths
            state.observe(trained_on, lengths, update=step + UPDATES, warm=True, fresh=False)
    assert state.section(update=9).band().drift == state.section(update=4).band().drift
    assert state.section(update=4).band().drift == pytest.approx(-(0.026**2) / 2, rel=0.1)


def test_the_learning_signal_moves_neither_centre_nor_width() -> None:
    """A shift of all log-ratios, as by learning, is no drift: a band that followed it would not clip it."""
    plain, shifted = (FSPOLoss().start(longest=8000, updates=UPDATES, rollouts=8) for _ in range(2))
    for number in range(8):
        for step, sums, lengths in rollout(0.02, 8000, number):
            plain.observe(sums, lengths, update=step, warm=True)
            shifted.observe(sums + 1e-4 * lengths, lengths, update=step, warm=True)
    drift = plain.metrics()["fspo/drift"]
    assert shifted.metrics()["fspo/drift"] == pytest.approx(drift, rel=0.02)


@pytest.mark.parametrize("follow", [False, True])
def test_a_resumed_run_has_the_same_band(follow: bool) -> None:
    loss = FSPOLoss(recalibrate=follow)
    state = trained(loss, 0.02, 8000)
    resumed = loss.start(longest=8000, updates=UPDATES, rollouts=8)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert resumed.metrics() == state.metrics()
    first = state.state_dict()["calibrator"]["steady_c"]
    for sigma, ratio in ((0.06, 2.0), (0.02, 1.0), (0.002, 0.5)):
        for number in range(20):
            for step, sums, lengths in rollout(sigma, 8000, number, size=256):
                for one in (state, resumed):
                    one.observe(sums, lengths, update=step, warm=True)
        assert resumed.metrics() == state.metrics()
        assert state.metrics()["fspo/c_low"] == pytest.approx(ratio * first if follow else first, rel=0.02)
