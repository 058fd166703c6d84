"""Verdicts on claims, where they are known."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from launch import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import density
import drift
import recompute
from claims import CLAIMS, Claim, compare, differences, holm, judge, read_claims
from evidence import PARTS
from megatron_fspo.lab.sweep.file import read_sweep

GAPS = np.array([-1.0, 1, -1, 1, -1, 1, -1, 1]) / 1000


def claim(test: Any, margin: float = 0.02) -> Claim:
    beyond = test == "beyond"
    test = "above" if beyond else test
    return Claim(part="p", text="t", figure="f", arm="a", less="b", test=test, margin=margin, beyond=beyond)


@pytest.mark.parametrize(
    ("test", "shift", "spread", "verdict"),
    [
        ("above", 0.05, 1.0, "supported beyond the margin"),
        ("above", 0.021, 6.0, "supported"),
        ("beyond", 0.021, 6.0, "direction only"),
        ("beyond", 0.05, 1.0, "supported beyond the margin"),
        ("above", 0.01, 1.0, "supported within the margin"),
        ("below", 0.05, 1.0, "dead"),
        ("below", 0.021, 6.0, "opposite"),
        ("below", 0.01, 1.0, "no difference"),
        ("above", 0.0, 1.0, "no difference"),
        ("above", 0.0, 30.0, "open"),  # nothing is known
        ("equal", 0.005, 1.0, "supported"),  # a difference, but within the margin
        ("equal", 0.05, 1.0, "dead"),
        ("equal", 0.021, 6.0, "different"),  # a difference, but not known to exceed the margin
        ("equal", 0.0, 18.0, "open"),  # within the margin perhaps: too few seeds to say
    ],
)
def test_a_verdict_is_what_the_runs_show(test: str, shift: float, spread: float, verdict: str) -> None:
    found = compare((GAPS * spread + shift).tolist(), 0.02)
    assert judge([claim(test)], [found]) == [verdict]
    assert (found.power >= 0.8) == (spread < 15)
    # In a family of many that show nothing it needs more.
    many = judge([claim(test)] * 2, [found, None])
    assert many[1] == "not run"


def test_kept_records_give_the_printed_figures_again() -> None:
    result = json.loads((REPO / "benchmarks/results/evidence_ledger.json").read_text(encoding="utf-8"))
    found = recompute.figures(REPO / "benchmarks/results/evidence_ledger.npz")
    assert found.keys() == result["arms"].keys()
    for arm, (short, long, *errors) in found.items():
        names = ("lre_signed", "lre_within_sign", "lre_within_update")
        assert errors == pytest.approx([result["arms"][arm][name]["value"] for name in names], rel=1e-6)
        low, high = sorted([short, long])
        assert low <= result["arms"][arm]["clipped"]["value"] <= high


@pytest.mark.parametrize("part", ["filler_certain", "filler_uncertain"])
def test_counts_and_records_give_the_clip_rates_of_the_ledger_with_filler_again(part: str) -> None:
    path = REPO / f"benchmarks/results/evidence_{part}.npz"
    result = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    found = recompute.filler(path)
    assert found.keys() == result["arms"].keys()
    with np.load(path) as file:
        seeds, arms, clipped, judged = (file[name] for name in ("seeds", "arms", "clipped", "judged"))
        of_run, steps = file["run"], file["step"]
    assert sorted(set(seeds.tolist())) == result["sweep"]["seeds"]
    for arm, (first, last, change, *_, of_first) in found.items():
        assert change == pytest.approx(last - first)
        assert change == pytest.approx(result["arms"][arm]["clipped_more"]["value"], abs=1e-6)
        own = of_run == np.flatnonzero((arms == arm) & (seeds == seeds.min()))[0]
        late = own & np.isin(steps, np.array_split(steps[own], 4)[-1])
        assert of_first == pytest.approx(clipped[late].sum() / judged[late].sum(), abs=1e-9)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([0.02, 0.02, 0.02]) == [False] * 3 and holm([]) == []


def test_claims_are_of_sweeps_and_compared_by_seed() -> None:
    claims = read_claims()
    assert len(claims) == len(tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]) >= 6
    removed = {"noise_signal"}  # after its runs
    for one in claims:
        sweep = read_sweep(REPO / f"benchmarks/evidence/{one.part}.toml")
        assert one.part in PARTS and {one.arm, one.less} - removed <= sweep.arms.keys() and one.margin > 0
    for one in read_claims(REPO / "benchmarks/evidence/claims_filler.toml"):
        arms = read_sweep(REPO / f"benchmarks/evidence/{one.part}.toml").arms
        assert one.part in PARTS and {one.arm, one.less} - {""} <= arms.keys()
    for one in read_claims(REPO / "benchmarks/evidence/claims_density.toml"):
        of_setting = {
            density.name_of(kind, temper, rate, arm)
            for kind, rate, temper in product(density.DENSITIES, density.RATES, density.ARMS)
            for arm in density.ARMS[temper]
        }
        assert one.part == "density" and {one.arm, one.less} <= of_setting
    for one in read_claims(REPO / "benchmarks/evidence/claims_drift.toml"):
        arms = {
            drift.name_of(*each, arm)
            for each in product(drift.ARMS, drift.TEMPERS)
            for arm in drift.ARMS[each[0]]
        }
        assert one.part == "drift" and {one.arm, one.less} <= arms
    runs = [("a", 1, 0.5), ("b", 2, 0.1), ("b", 1, 0.2), ("a", 3, 0.9)]
    result = {"runs": [{"arm": arm, "seed": seed, "f": value} for arm, seed, value in runs]}
    assert differences(result, claim("above")) == pytest.approx([0.3])
    assert differences(result, replace(claim("above"), less="")) == [0.5, 0.9]
