"""What the report computes, by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_fspo.lab.report import pictures
from megatron_fspo.lab.report.history import (
    Records,
    clip_rates,
    overall_rates,
    pooled_lre,
    read_records,
    signed_errors,
)
from report_runs import make_config, records_from, write_run


def test_clip_rates_by_length_by_hand() -> None:
    # Two bins of four: L 1–3 and 10–12. Outside: 1/4 and 3/4. With A ≠ 0: 2 of 4 and 4 of 4.
    records = records_from(
        lengths=[1, 10, 2, 11, 2, 12, 3, 12],
        out_of_band=[True, True, False, True, False, True, False, False],
        clipped=[True, True, False, False, False, False, False, False],
        advantages=[1.0, -1.0, 0.0, 1.0, 0.0, 1.0, -1.0, 1.0],
    )
    short, long = clip_rates(records, num_bins=2)
    assert (short.low, short.high, short.records, short.judged) == (1, 3, 4, 2)
    assert (short.out_of_band, short.clipped) == (0.25, 0.5)
    assert (short.ess, long.ess) == (0.5, 0.75), "of equal weights and zeros, the share that is not zero"
    assert (long.low, long.high, long.records, long.judged) == (10, 12, 4, 4)
    assert (long.out_of_band, long.clipped) == (0.75, 0.25)
    whole = overall_rates(records)
    assert (whole.low, whole.high, whole.out_of_band, whole.clipped) == (1, 12, 0.5, 2 / 6)
    (only,) = clip_rates(unclippable := records_from([3, 3], [True, False], [False, False], [0.0, 0.0]))
    assert (only.out_of_band, only.judged) == (0.5, 0) and math.isnan(only.clipped)
    drawn = pictures.rates_by([only], overall_rates(unclippable), "L")
    assert {row["line"] for row in drawn["data"]["values"]} == {"outside"}


def test_pooled_lre_by_hand() -> None:
    # Accepted: all of L = 5, half of L = 50; ā = 3/4, so Σ ½·|1/(3/4) − 1| + ½·|½/(3/4) − 1| = 1/3.
    outside = [False] * 40 + [True, False] * 20
    records = records_from([5] * 40 + [50] * 40, outside, [False] * 80, [1.0] * 80)
    found = pooled_lre(records)
    assert found.mean == pytest.approx(1 / 3)
    assert found.max == pytest.approx(1 / 3)
    assert found.null_mean < 0.15 < found.mean_interval[0]


def test_signed_errors_by_hand() -> None:
    """Clipped in the second of two optimizer steps: with A > 0 the long ones, with A < 0 the short ones."""
    signs, updates, lengths = np.array([1.0, -1.0] * 40), np.repeat([1, 2], 40), np.tile([5, 5, 50, 50], 20)
    clipped = ((signs > 0) == (lengths > 9)) & (updates == 2)
    records = records_from(lengths, clipped, clipped, signs)
    errors = signed_errors(Records(**{**vars(records), "update": updates}))
    means = {name: error.mean for name, error in errors.items()}
    # Kept: 3/4 of all, of each length and each sign; 1 and 1/2 of the steps.
    assert means == pytest.approx(
        {"length": 0, "sign": 0, "within_sign": 1 / 3, "update": 1 / 3, "within_update": 0}
    )


def test_the_tail_of_the_records_is_the_last_steps() -> None:
    records = records_from([1] * 40, [False] * 40, [False] * 40, [1.0] * 40)
    records = Records(**{**vars(records), "step": np.repeat(np.arange(1, 21), 2)})
    assert np.unique(records.tail(0.25, 2).step).tolist() == [16, 17, 18, 19, 20]
    assert np.unique(records.tail(0.25, 8).step).tolist() == [*range(13, 21)]
    assert np.unique(records.tail(0.0, 1).step).tolist() == [20]
    thinned = records.thinned(5).step.tolist()
    assert len(thinned) == 5 and (thinned[0], thinned[-1]) == (1, 20)


def test_what_lies_beyond_the_scatter_is_at_its_edge() -> None:
    sums = [0.01] * 97 + [5.0, -7.0, 0.02]
    records = records_from([4] * 100, [False] * 100, [False] * 100, [1.0] * 100, sums)
    (cloud,) = pictures.scatter(records, band=None)["layer"]
    assert sorted({row["y"] for row in cloud["data"]["values"]}) == [-7.0, 0.01, 0.02, 5.0]
    low, high = cloud["encoding"]["y"]["scale"]["domain"]
    assert (low, high) == pytest.approx((-0.01, 0.01)), "95% of the records"
    assert f"datum.y > {high}" in str(cloud["encoding"]["shape"])


def test_of_a_long_run_an_even_part_of_the_records_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(make_config(tmp_path), steps=200)
    everything = read_records(run)
    assert np.unique(everything.step).tolist() == [*range(1, 201)]
    size = (run / "sequences.jsonl").stat().st_size
    monkeypatch.setattr("megatron_fspo.lab.report.history._RECORD_BYTES", size // 10)
    part = read_records(run)
    steps = np.unique(part.step)
    assert 18 <= len(steps) <= 22 and steps[-1] == 200 and steps[0] <= 1
    assert np.diff(steps).max() <= 13
    assert len(part) == np.isin(everything.step, steps).sum(), "steps are read whole"
