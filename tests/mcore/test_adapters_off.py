"""The reference policy of a run that trains adapters, and what its servers are sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import run_worker


@pytest.mark.slow
def test_without_its_adapters_a_policy_is_the_base(tmp_path: Path) -> None:
    run_worker(Path(__file__).with_name("adapters_worker.py"), str(tmp_path / "out.json"), nproc=2)
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["off"] == out["after"] == 0 and out["on"] > 0.1
    assert out["tensors"] <= 1e-12 and out["names"] == []
