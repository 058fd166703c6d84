"""examples/slurm on a Slurm of this machine, in the place of a container; slurm_local.py has more by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch import REPO, environment
from slurm_local import why_not


@pytest.mark.slow
@pytest.mark.long
def test_a_trial_has_all_cores_of_its_nodes() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    words = [sys.executable, "tests/cluster/slurm_local.py", "--stops", "--kinds", "container"]
    done = subprocess.run(words, cwd=REPO, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, trial = done.stdout.splitlines()
    assert alone == "cores of a step that asks for none: 1, of 2"
    assert trial.startswith("container: train on 2 cores, train on 2 cores; ['done. ")
