"""What docs/performance.md says of sampling ahead."""

from __future__ import annotations

import json

from benchmarks import async_rollouts
from launch import REPO


def test_the_page_shows_what_was_measured() -> None:
    report = json.loads((REPO / "benchmarks/results/async_rollouts.json").read_text(encoding="utf-8"))
    page = (REPO / "docs/performance.md").read_text(encoding="utf-8")
    assert async_rollouts.table(report) in page
    assert report["command"] in page
    assert f"It finishes {report['steps_ratio']:.2f} times the steps" in page
    assert f"means of two runs of {report['steps']} steps" in page
    assert len(report["runs"]["sync"]) == len(report["runs"]["async"]) == 2
