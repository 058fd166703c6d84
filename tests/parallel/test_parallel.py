from pathlib import Path

import pytest

from launch import run_worker


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_reductions_match_float64_oracles(nproc: int) -> None:
    """Log-probs, entropy, sequence sums and metrics on real ranks; see worker.py for each check."""
    assert f"all held on {nproc} ranks" in run_worker(Path(__file__).with_name("worker.py"), nproc=nproc)
