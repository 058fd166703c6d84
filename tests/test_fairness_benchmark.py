"""The pure functions of ``benchmarks/fairness.py`` on S ~ Normal(0, σ²L), where the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

from benchmarks import fairness
from megatron_fspo.losses import FSPOLoss, GSPOLoss, RLOOLoss
from megatron_fspo.objective import FSPOBand, GSPOBand, RLOOBand
from megatron_fspo.report.history import Records, read_records

SIGMA, CLIP_RATE = 0.02, 0.1


def random_walks(count: int, seed: int) -> Records:
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 101, count)
    nothing = np.zeros(count, dtype=bool)
    return Records(
        step=np.ones(count, dtype=np.int64),
        length=lengths,
        log_ratio_sum=random.normal(size=count) * SIGMA * np.sqrt(lengths),
        advantage=np.ones(count),
        clipped=nothing,
        out_of_band=nothing,
        ratio=np.ones(count),
    )


def judged(records: Records, loss: dict) -> Records:
    """The records with the verdict of the band that this ``loss`` section stands for."""
    loss = dict(loss)
    band = {"fspo": FSPOBand, "rloo": RLOOBand, "gspo": GSPOBand}[loss.pop("name")]
    loss.pop("dual_clip", None)
    low, high = band(**loss).bounds(torch.from_numpy(records.length).double())
    sums = records.log_ratio_sum
    return replace(records, out_of_band=(sums < low.numpy()) | (sums > high.numpy()))


@pytest.fixture(scope="module")
def runs() -> dict[str, Records]:
    """Per method, other records than those that set the widths."""
    losses = fairness.matched_losses(random_walks(40_000, seed=0), CLIP_RATE)
    return {method: judged(random_walks(40_000, seed=1), loss) for method, loss in losses.items()}


def test_every_method_rejects_the_asked_share_of_the_pilot_on_both_sides() -> None:
    pilot = random_walks(20_000, seed=0)
    for method, loss in fairness.matched_losses(pilot, CLIP_RATE).items():
        outside = judged(pilot, loss).out_of_band
        assert outside.mean() == pytest.approx(CLIP_RATE, abs=1e-3), method
        assert (pilot.log_ratio_sum[outside] > 0).mean() == pytest.approx(0.5, abs=0.05), method


def test_the_width_of_fspo_is_the_normal_quantile() -> None:
    losses = fairness.matched_losses(random_walks(200_000, seed=0), CLIP_RATE)
    width = SIGMA * NormalDist().inv_cdf(1 - CLIP_RATE / 2)
    assert losses["fspo"]["c_low"] == losses["fspo"]["c_high"] == pytest.approx(width, rel=0.02)


def test_the_losses_are_legal_and_without_a_dual_clip() -> None:
    losses = fairness.matched_losses(random_walks(1_000, seed=0), CLIP_RATE)
    assert FSPOLoss(**losses["fspo"]).dual_clip == "off"
    assert RLOOLoss(**losses["rloo"]).dual_clip_ratio is None
    assert GSPOLoss(**losses["gspo"]).dual_clip_ratio is None


def test_only_fspo_is_fair_to_length(runs: dict[str, Records]) -> None:
    figures = {method: fairness.fairness(records) for method, records in runs.items()}
    for figure in figures.values():
        assert figure["clip_rate"] == pytest.approx(CLIP_RATE, abs=0.01)
    assert figures["fspo"]["lre_mean"] < 2 * figures["fspo"]["null_mean"]
    for other in ("rloo", "gspo"):
        assert figures[other]["lre_mean"] > 10 * figures["fspo"]["lre_mean"]
        assert figures[other]["lre_max"] > 5 * figures["fspo"]["lre_max"]


def test_rates_by_length_rise_for_rloo_fall_for_gspo_and_are_flat_for_fspo(runs: dict[str, Records]) -> None:
    lengths, rates = fairness.rates_by_length(list(runs.values()))
    fspo, rloo, gspo = (dict(zip(runs, rates, strict=True))[name] for name in ("fspo", "rloo", "gspo"))
    assert lengths == sorted(lengths) and len(lengths) == 8
    assert rloo == sorted(rloo) and rloo[-1] > 0.2 and rloo[0] < 0.01
    assert gspo[0] > 0.3 and gspo[-1] < 0.03
    assert max(fspo) - min(fspo) < 0.03


def test_rates_by_length_keep_runs_apart_and_share_bins() -> None:
    short, long = random_walks(400, seed=0), random_walks(600, seed=1)
    runs = [replace(short, out_of_band=~short.out_of_band), long]
    _, rates = fairness.rates_by_length(runs)
    assert rates == [[1.0] * 8, [0.0] * 8]


def test_records_are_pooled_over_all_steps(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "length": [4, 9], "log_ratio_sum": [0.1, -0.2], "out_of_band": [False, True]},
        {"step": 2, "length": [16], "log_ratio_sum": [0.3], "out_of_band": [True]},
    ]
    lines = [
        json.dumps({**r, "advantage": [0.0] * len(r["length"]), "clipped": r["out_of_band"]}) for r in rows
    ]
    (tmp_path / "sequences.jsonl").write_text("\n".join(lines) + "\n")
    assert fairness.fairness(read_records(tmp_path))["clip_rate"] == pytest.approx(2 / 3)


def test_mean_interval_is_students() -> None:
    mean, reach = fairness.mean_interval([1.0, 2.0, 3.0])
    assert (mean, reach) == (2.0, pytest.approx(4.303 / 3**0.5))


def test_summary_compares_seed_by_seed_and_the_table_says_so() -> None:
    lre = {"fspo": (0.1, 0.3), "rloo": (0.2, 0.2), "gspo": (0.4, 0.4)}
    runs = [
        dict.fromkeys(fairness.FIGURES, lre[method][seed])
        | {"method": method, "seed": seed, "clip_rate_by_length": [0.1, 0.2]}
        for seed in (0, 1)
        for method in lre
    ]
    summary = fairness.summarize(runs)
    assert summary["fspo/lre_mean"] == {
        "over_rloo": pytest.approx(1.0),
        "over_gspo": pytest.approx(0.5),
        "below_both": 1,
    }
    assert summary["rloo"]["clip_rate_by_length"] == [(0.1, 0.0), (0.2, 0.0)]
    assert "lre_max: FSPO/RLOO 1.00, FSPO/GSPO 0.50; below both in 1 of 2 seeds" in fairness.table(summary, 2)


def test_the_picture_is_a_small_svg_and_the_same_every_time(tmp_path: Path) -> None:
    rates = {
        "clip_rate_by_length": [(0.1, 0.01), (0.2, 0.02)],
        "lre_mean": (0.1, 0.0),
        "clip_rate": (0.1, 0.0),
    }
    for name in ("a.svg", "b.svg"):
        fairness.draw([10.0, 50.0], dict.fromkeys(fairness.EXPONENTS, rates), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "<svg" in text and len(text) < 200_000
