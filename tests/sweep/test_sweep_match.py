"""Limits at a matched clip rate, on records where the share outside can be counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.report.history import History, Records
from megatron_fspo.lab.sweep.processes import matched_loss, steady

RUN = REPO / "examples/make_sum/run.toml"


def walks(count: int = 4000) -> Records:
    """S ~ Normal(0, σ²L); a seventh is outside, whatever the band was."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, 101, count)
    return Records(
        step=np.arange(count) * 10 // count + 1,
        length=lengths,
        log_ratio_sum=random.normal(size=count) * 0.02 * np.sqrt(lengths),
        advantage=np.ones(count),
        clipped=np.zeros(count, dtype=bool),
        out_of_band=np.arange(count) % 7 == 0,
        ratio=np.ones(count),
    )


def config_with(tmp_path: Path, **loss: Any) -> Config:
    over = tmp_path / "over.toml"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in loss.items())
    over.write_text(f"[loss]\n{lines}\n", encoding="utf-8")
    return load_config([RUN, over])


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "fspo", "c_low": 0.03, "c_high": 0.06, "calibrate": 14},
        {"name": "fspo", "exponent": 0.8},
        {"name": "rloo"},
        {"name": "gspo", "eps_high": 0.001},
    ],
)
def test_as_large_a_share_lies_outside(tmp_path: Path, keys: dict[str, Any]) -> None:
    records, before = walks(), config_with(tmp_path, **keys)
    found = matched_loss(before, records)
    assert found["name"] == keys["name"] and not found.get("calibrate")
    band = config_with(tmp_path, **found).loss.band()
    assert band is not None
    low, high = band.bounds(torch.from_numpy(records.length).double())
    outside = (records.log_ratio_sum < low.numpy()) | (records.log_ratio_sum > high.numpy())
    assert outside.mean() == pytest.approx(records.out_of_band.mean(), abs=3e-4)
    if keys.get("c_high") == 0.06:
        assert found["c_high"] == pytest.approx(2 * found["c_low"])


def test_a_share_that_no_limits_leave_outside_is_refused(tmp_path: Path) -> None:
    records = walks()
    far = replace(records, log_ratio_sum=3000 * records.log_ratio_sum)
    with pytest.raises(InputError, match="rloo: no limits"):
        matched_loss(config_with(tmp_path, name="rloo"), far)


@pytest.mark.parametrize("name", ["ctpo", "grpo"])
def test_a_loss_without_a_band_on_s_cannot_be_matched(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"loss.name = {name} has no band on S"):
        matched_loss(config_with(tmp_path, name=name), walks())


@pytest.mark.parametrize(("moved", "first"), [(None, 1), (3, 4)])
def test_what_came_before_the_calibration_is_left_out(tmp_path: Path, moved: int | None, first: int) -> None:
    rows = [{"step": 0, "val/x/mean@4": 0.5}]
    rows += [
        {"step": n, "fspo/c_high": 0.05 if moved and n >= moved else 0.03, "critic/rewards/mean": 0.0}
        for n in range(1, 11)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert steady(walks(), History(tmp_path)).step.min() == first
