"""Ceilings of what a reader meets on the way of one training step. They fall; a rise needs a reason."""

from __future__ import annotations

import re

from launch import REPO, forked, why

FILES = 46
FUNCTIONS = 298  # 4 more since layers of a model may differ, 4 for SFT and the reward's interval
UPDATE_FILES = 16
"""Files of one training step, its functions, and files of one optimizer step on one micro-batch."""


def test_a_step_enters_no_more_than_the_ceilings() -> None:
    done = forked([str(REPO / "tests/trace_step.py")], nproc=0)
    assert done.returncode == 0, why(done.stderr)
    files, functions, update_files = map(int, re.findall(r"\d+", done.stdout))
    assert files <= FILES, done.stdout
    assert functions <= FUNCTIONS, done.stdout
    assert update_files <= UPDATE_FILES, done.stdout
    assert min(files, update_files) > 10, done.stdout
