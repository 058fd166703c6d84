"""What one calibration predicts of another: right of the same noise, wrong of other noise."""

from __future__ import annotations

import noise_check
from calibrations import calibration
from megatron_fspo.objective.noise import Noise


def noise(seed: int) -> Noise:
    return calibration(seed=seed, sequences=400).comparisons[3].noise()


def test_the_same_noise_is_predicted_and_other_noise_is_not() -> None:
    first, second = noise(0), noise(1)
    found = list(noise_check.rows(first, second, []))
    assert len(found) == 3 * 4 and {row.behind for row in found} == {99}
    assert sum(row.consistent for row in found) >= 11
    wider = Noise(drift=second.drift, lengths=second.lengths, residuals=3 * second.residuals)
    assert sum(row.consistent for row in noise_check.rows(first, wider, [])) <= 1


def test_a_width_may_be_given() -> None:
    found = list(noise_check.rows(noise(0), noise(1), [0.03]))
    assert [row.c for row in found] == [0.03] * 4 and sum(row.responses for row in found) == 399
