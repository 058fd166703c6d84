"""Resuming after kill -9: a few of the kills of ``kill_runs.py``, at the moments that cost most."""

from __future__ import annotations

from pathlib import Path

import pytest

from kill_runs import Harness, Kill

pytestmark = pytest.mark.slow

KILLS = [
    Kill(point="update", step=1, count=3, rank=0, victims="all", delay=0.0, asynchronous=False),
    Kill(point="row", step=2, count=1, rank=0, victims="all", delay=0.1, asynchronous=True),
    Kill(point="named", step=2, count=1, rank=0, victims="all", delay=0.1, asynchronous=False),
    Kill(point="files", step=4, count=20, rank=1, victims="rank 1", delay=0.0, asynchronous=True),
    Kill(point="export", step=0, count=5, rank=0, victims="all", delay=0.0, asynchronous=False),
]


def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.reference()
    assert harness.run("killed", KILLS) == []
    assert not harness.problems
