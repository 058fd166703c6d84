"""From the ``loss`` section to an objective; what calibration and drift do to it during a run."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.losses import FSPOLoss, LossState, PolicyLossConfig
from megatron_fspo.losses.fspo import WATCHED
from megatron_fspo.objective import FSPOBand, LengthFairDualClip
from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.objective.surrogate import SequenceLevel

LENGTHS = torch.tensor([1, 10, 100, 1000])


def state(name: str, *, longest: int = 9, updates: int = 1, **keys: Any) -> LossState:
    adapter: TypeAdapter[PolicyLossConfig] = TypeAdapter(PolicyLossConfig)
    return adapter.validate_python({"name": name, **keys}).start(longest=longest, updates=updates)


def sums(seed: int, sigma: float = 0.05) -> Tensor:
    noise = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise * sigma * LENGTHS.sqrt()


def observe(loss: LossState, s: Tensor, *, update: int = 2, warm: bool = True) -> None:
    loss.observe(s, LENGTHS, update=update, warm=warm)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("fspo", {"dual_clip": "off"}), ("fspo", {"drift": "given"}), ("dapo", {"eps_low": 0.1})],
)
def test_limits_without_a_moving_part_stay(name: str, keys: dict[str, Any]) -> None:
    loss = state(name, **keys)
    objective = loss.objective()
    observe(loss, sums(1))
    assert loss.objective() == objective
    assert (loss.metrics() == {}) == (name != "fspo")
    assert loss.width_warnings({}, warm=True) == {}


def test_calibration_waits_for_warm_batches_then_stays() -> None:
    # Windows are of whole rollouts: 2 mini-batches are rounded up to 3.
    loss = state(
        "fspo",
        calibrate=2,
        updates=3,
        c_low=0.02,
        c_high=0.04,
        exponent=0.25,
        drift="none",
        recalibrate=False,
    )
    given = {"fspo/c_low": 0.02, "fspo/c_high": 0.04, "fspo/drift": 0.0, "fspo/exponent": 0.25}
    for seed in range(3):
        observe(loss, sums(seed, sigma=1e-4), warm=False)
    loss.observe(torch.zeros(4), LENGTHS, update=2, warm=True)  # nothing has moved: says nothing
    loss.observe(torch.tensor([0.0, 0.0, 0.0, 1.0]), LENGTHS, update=2, warm=True)  # hardly anything has
    loss.observe(sums(4) * math.nan, LENGTHS, update=2, warm=True)
    assert loss.metrics() == given and loss.calibrated() is None
    batch = torch.cat([sums(seed) for seed in range(50)])
    lengths = LENGTHS.repeat(50)
    for number in range(6):
        assert (loss.metrics() == given) == (number < 3)
        assert (loss.calibrated() is None) == (number < 3)
        loss.observe(batch, lengths, update=2, warm=True)

    c = 2 * sigma_hat(batch, lengths, 0.25)
    # The two sides keep their ratio, and c is their mean.
    moved = {"fspo/c_low": c / 1.5, "fspo/c_high": c / 0.75, "fspo/drift": 0.0, "fspo/exponent": 0.25}
    assert loss.metrics() == pytest.approx(moved)
    objective = loss.objective()
    assert isinstance(objective, SequenceLevel)
    assert isinstance(objective.dual_clip, LengthFairDualClip)
    assert objective.dual_clip.c == pytest.approx(2 * c / 0.75)
    observe(loss, sums(5))
    assert loss.objective() == objective


@pytest.mark.parametrize(
    ("sigma", "clipped", "topic"),
    [
        (0.009, 0.10, "wide band"),
        (0.015, 0.009, "wide band"),
        (0.0101, 0.10, None),
        (0.0199, 0.39, None),
        (0.0201, 0.10, "narrow band"),
        (0.015, 0.41, "narrow band"),
    ],
)
def test_a_band_that_does_not_fit_is_doubted(sigma: float, clipped: float, topic: str | None) -> None:
    """c = 0.03: 1.5 to 3 σ̂ and a clip rate of 1% to 40% are in order; one step says nothing."""
    loss = state("fspo", c_low=0.02, c_high=0.04)
    row = loss.metrics() | {"fspo/sigma_hat": sigma, "actor/pg_clipfrac": clipped}
    for _ in range(WATCHED - 1):
        assert loss.width_warnings(row, warm=True) == {}
    assert loss.width_warnings(row | {"fspo/sigma_hat": 7.0, "actor/pg_clipfrac": 1.0}, warm=False) == {}
    # No response has an advantage, as where a teacher alone is learned.
    assert loss.width_warnings(row | {"actor/pg_clipfrac": math.nan}, warm=True) == {}
    assert loss.width_warnings(loss.metrics(), warm=True) == {}  # a step without off-policy sequences
    doubts = loss.width_warnings(row | {"fspo/sigma_hat": 7.0}, warm=True)  # an outlier moves no median
    assert list(doubts) == [topic] * (topic is not None)
    assert all(f"2 sigma-hat is now {2 * sigma:.2g}" in text for text in doubts.values())
    # A band that has moved is judged anew.
    assert loss.width_warnings(row | {"fspo/c_low": 0.035}, warm=True) == {}


def test_a_measured_exponent_comes_with_the_width_and_stays() -> None:
    keys = {"calibrate": 3, "exponent": "measured", "recalibrate": False}
    loss = state("fspo", **keys, c_low=0.02, c_high=0.04, c_dual=0.1, longest=1000)
    lengths = torch.arange(1, 400).repeat(3)
    for seed in range(7):
        assert (loss.calibrated() is None) == (seed < 3)
        noise = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        loss.observe(0.02 * noise * lengths**0.8, lengths, update=2, warm=True)
    objective = loss.objective()
    assert isinstance(objective, SequenceLevel) and isinstance(objective.band, FSPOBand)
    assert isinstance(objective.dual_clip, LengthFairDualClip)
    assert objective.band.exponent == objective.dual_clip.exponent == loss.metrics()["fspo/exponent"]
    assert objective.band.exponent == pytest.approx(0.8, abs=0.1)
    assert objective.band.c_low == pytest.approx(objective.band.c_high / 2)
    assert objective.dual_clip.c == pytest.approx(2.5 * objective.band.c_high)
    assert "95% interval" in str(loss.calibrated())
    resumed = state("fspo", **keys, c_low=0.02, c_high=0.04, c_dual=0.1, longest=9)
    resumed.load_state_dict(json.loads(json.dumps(loss.state_dict())))
    assert resumed.objective() == objective and resumed.calibrated() == loss.calibrated()


def test_an_exponent_to_be_measured_needs_mini_batches() -> None:
    with pytest.raises(ValueError, match=r"loss\.exponent = measured needs loss\.calibrate of 3"):
        FSPOLoss(exponent="measured", calibrate=2)


def test_an_exponent_that_cannot_be_measured_is_said() -> None:
    loss = state("fspo", calibrate=3, exponent="measured")
    assert loss.metrics()["fspo/exponent"] == 0.5
    for _ in range(6):
        observe(loss, sums(1))
    assert loss.metrics()["fspo/exponent"] == 0.5
    assert "cannot be measured: 24 sequences" in str(loss.calibrated())
    with pytest.raises(ValueError, match=r"measured needs loss\.calibrate of 3 or more, not 2"):
        state("fspo", calibrate=2, exponent="measured")


@pytest.mark.parametrize(
    ("keys", "rollouts", "off_policy", "key"),
    [
        ({"calibrate": 4}, 3, 3, "loss.calibrate = 4"),
        ({"calibrate": 4}, 4, 3, None),
        ({}, 30, 0, "on-policy"),
        ({}, 1, 3, None),
        ({"c_high": 0.2}, 30, 3, "loss.c_high = 0.2"),
        ({"c_high": 0.2, "calibrate": 14}, 30, 3, None),
    ],
)
def test_a_band_that_will_not_act_is_noted_before_the_run(
    keys: dict[str, Any], rollouts: int, off_policy: int, key: str | None
) -> None:
    notes = FSPOLoss(**keys).notes(rollouts=rollouts, off_policy_updates=off_policy)
    assert len(notes) == (key is not None)
    assert all(key in note for note in notes)


@pytest.mark.parametrize(
    ("keys", "rollouts", "measured"),
    [({}, 4, 8), ({}, 3, None), ({"calibrate": 0}, 9, None), ({"c_low": 0.02}, 9, None)],
)
def test_the_default_measures_c_where_a_run_can(
    keys: dict[str, Any], rollouts: int, measured: int | None
) -> None:
    loss = FSPOLoss(**keys).start(longest=1000, updates=2, rollouts=rollouts)
    calls, start = range(1, 12), loss.metrics()["fspo/c_low"]
    steady = [call for call in calls if observe(loss, sums(1)) or loss.metrics()["fspo/c_low"] != start]
    assert (steady[0] if steady else None) == (None if measured is None else measured // 2)
    assert loss.metrics()["fspo/c_high"] == loss.metrics()["fspo/c_low"] or "c_low" in keys


@pytest.mark.parametrize("seen", range(7))
@pytest.mark.parametrize("keys", [{"calibrate": 2}, {"calibrate": 3, "exponent": "measured"}])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(seen: int, keys: dict[str, Any]) -> None:
    whole, first, second = (state("fspo", **keys) for _ in range(3))
    for step in range(6):
        observe(whole, sums(step), update=2 + step % 2)
    for step in range(seen):
        observe(first, sums(step), update=2 + step % 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.objective() == first.objective()
    for step in range(seen, 6):
        observe(second, sums(step), update=2 + step % 2)
    assert second.objective() == whole.objective()
    assert second.state_dict() == whole.state_dict()
    assert len(json.dumps(whole.state_dict())) < 800  # the measurements are gone once σ̂ is steady


def test_the_configuration_wins_over_a_checkpoint() -> None:
    measured = state("fspo", calibrate=1)
    for _ in range(2):
        observe(measured, 5 * sums(1))
    assert measured.metrics()["fspo/drift"] < -0.001
    fixed = state("fspo", drift="given", drift_value=-0.002)
    fixed.load_state_dict(measured.state_dict())
    given = {"fspo/c_low": 0.03, "fspo/c_high": 0.03, "fspo/drift": -0.002, "fspo/exponent": 0.5}
    assert fixed.metrics() == given
    # The other way round, a run that calibrates from now on.
    late = state("fspo", calibrate=1)
    late.load_state_dict(fixed.state_dict())
    assert late.metrics()["fspo/c_low"] == 0.03
    state("rloo").load_state_dict(measured.state_dict())


def test_a_calibration_of_other_settings_is_refused() -> None:
    measured = state("fspo", calibrate=3)
    with pytest.raises(
        InputError, match=r"^loss\.calibrate or loss\.exponent has changed: .*'mini_batches': 3"
    ):
        state("fspo", calibrate=4).load_state_dict(measured.state_dict())
