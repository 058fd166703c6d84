"""Ranks that are forked: they begin with all imports done, and their end is told as a launcher tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend import FAKE
from launch import forked

PROGRAM = """
import sys
ready = {"megatron.core", "megatron_fspo.trainer.loop", "megatron_fspo.lab.report.page"} <= set(sys.modules)
sys.stderr.write(f"ready {ready}\\n")
sys.exit(3)
"""


@pytest.mark.skipif(torch.cuda.is_available() and not FAKE, reason="a process that has CUDA cannot be forked")
@pytest.mark.parametrize(("nproc", "status"), [(0, 3), (2, 1)])
def test_a_forked_process_is_ready_and_its_end_is_told(tmp_path: Path, nproc: int, status: int) -> None:
    """Imports of its own would cost each rank 3 s of CPU time. torchrun ends with 1 for any status."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = forked([str(tmp_path / "program.py")], nproc=nproc)
    assert done.returncode == status
    assert done.stderr.splitlines() and set(done.stderr.splitlines()) == {"ready True"}
