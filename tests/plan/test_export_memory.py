"""An export, and a weight update, hold some buckets of experts, not all of a rank's or of the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import REPO, found_by


@pytest.mark.slow
def test_no_rank_holds_more_than_two_experts_and_three_buckets(tmp_path: Path) -> None:
    worker = REPO / "benchmarks/export_memory.py"
    for rank in found_by(worker, tmp_path, "--narrow", nproc=4)["ranks"]:
        # The bucket that is sent, the next one, and the one before until it is freed.
        limit = 2 * rank["expert"] + 3 * rank["bucket"]
        assert rank["shard"] > 10 * limit, "or it would say nothing"
        assert all(0 < rank[what]["tensors"] <= limit for what in ("export", "update"))
