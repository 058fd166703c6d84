"""Memory that a policy lends between its optimizer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import run_worker


@pytest.mark.slow
def test_a_policy_that_lends_its_memory_learns_the_same(random_checkpoints: dict[str, Path]) -> None:
    worker = Path(__file__).with_name("offload_worker.py")
    said = run_worker(worker, str(random_checkpoints["tied"]), nproc=2)
    assert said.count("equal") == 2
