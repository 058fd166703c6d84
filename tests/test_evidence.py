"""``benchmarks/evidence.py``: its own functions, its short form for real, and the page that is made of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evidence
from launch import REPO, environment
from megatron_fspo.lab.report.history import Records
from megatron_fspo.lab.sweep.file import planned, read_sweep


def walks(count: int, seed: int, longest: int = 100) -> Records:
    """Responses of 4 to ``longest`` tokens, of which those above 50 are outside."""
    random = np.random.default_rng(seed)
    lengths = random.integers(4, longest + 1, count)
    return Records(
        step=np.ones(count, dtype=np.int64),
        length=lengths,
        log_ratio_sum=random.normal(size=count) * 0.02 * np.sqrt(lengths),
        advantage=np.ones(count),
        clipped=np.zeros(count, dtype=bool),
        out_of_band=lengths > 50,
        ratio=np.ones(count),
    )


def test_rates_are_over_bins_that_all_runs_share() -> None:
    lengths, rates = evidence.rates_by_length([walks(500, 1), walks(900, 2)])
    assert len(lengths) == 8 and lengths == sorted(lengths)
    for mine in rates:
        assert [rate for length, rate in zip(lengths, mine, strict=True) if length < 40] == [0] * 3
        assert mine[-3:] == [1] * 3


def test_bins_that_a_run_has_nothing_in_are_left_out() -> None:
    lengths, rates = evidence.rates_by_length([walks(500, 1), walks(500, 2, longest=40)])
    assert 3 <= len(lengths) <= 6 and max(lengths) < 45
    assert rates[1] == [0] * len(lengths)


def test_the_picture_is_a_small_svg_and_the_same_every_time(tmp_path: Path) -> None:
    rates = [{"value": 0.1, "half_width": 0.01}, {"value": 0.2, "half_width": 0.02}]
    arm = {"rates": rates, "lre_mean": {"value": 0.1, "half_width": 0.0}}
    for name in ("a.svg", "b.svg"):
        evidence.draw({"lengths": [10, 50], "arms": {"fspo": arm, "rloo": arm}}, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "<svg" in text and len(text) < 200_000


@pytest.mark.parametrize("part", evidence.PARTS)
def test_the_figures_are_of_the_sweep_that_is_there(part: str) -> None:
    """A file of figures holds the sweep it is of: changed settings need the command again."""
    sweep = read_sweep(REPO / f"benchmarks/evidence/{part}.toml")
    found = json.loads((REPO / f"benchmarks/results/evidence_{part}.json").read_text(encoding="utf-8"))
    assert found["sweep"] == sweep.model_dump(mode="json")
    assert found["command"] == f"python benchmarks/evidence.py {part}"
    runs = [f"{run['arm']}-{run['seed']}" for run in found["runs"]]
    assert runs == [run.name for run in planned(sweep)]


def test_claims_of_differences_are_corrected_for_their_number() -> None:
    spec = importlib.util.spec_from_file_location("make_evidence", REPO / "docs/make_evidence.py")
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    main = page.read("evidence_make_sum")
    p = page.p_values(main)
    assert len(p) == 20
    for (key, arm, other), value in p.items():
        if other == "measured":  # the same test as of the printed interval
            gap = main["differences"][arm][key]
            assert (value < 0.05) == (abs(gap["value"]) > gap["half_width"])
    p = {("x", "", ""): 0.03, ("y", "", ""): 0.02, ("z", "", ""): 0.01}
    assert page.holm(p) == set(p)
    assert page.holm({**p, ("z", "", ""): 0.02}) == set()


@pytest.mark.slow
def test_the_short_form_runs_and_keeps_nothing() -> None:
    results = {path: path.stat().st_mtime_ns for path in (REPO / "benchmarks/results").iterdir()}
    command = [sys.executable, "-W", "ignore", "benchmarks/evidence.py", "--short"]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "[2/2]" in done.stdout and "evidence_make_sum.json" in done.stdout
    assert results == {path: path.stat().st_mtime_ns for path in (REPO / "benchmarks/results").iterdir()}
