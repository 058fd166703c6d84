"""What docs/rewards.md says of speed is what was measured, and the benchmark measures."""

from __future__ import annotations

import json

import pytest

from benchmarks import rewards
from launch import REPO


def test_the_page_has_what_was_measured() -> None:
    report = json.loads((REPO / "benchmarks/results/rewards.json").read_text(encoding="utf-8"))
    page = (REPO / "docs/rewards.md").read_text(encoding="utf-8")
    assert rewards.table(report) in page and report["command"] in page
    assert report["tier1_of_aim"] >= 1 and report["pool_of_workers_alone"] >= 0.8
    assert report["responses"] == 1024 and report["sleep_of_longest"] < 1.5


def test_tier_1_is_fast_enough_here_too() -> None:
    assert max(rewards.tier1(2000) for _ in range(5)) > rewards.AIM


@pytest.mark.slow
def test_the_pool_is_measured() -> None:
    """Few tasks: a ratio that says that both sides work, not how fast they are."""
    (turn,) = rewards.pool_against_alone(workers=2, count=60, turns=1)
    assert turn[0] > 0.4 * turn[1] > 0
