"""A scalar of a response is written in two places: the completion's field and the rollout's column."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from launch import REPO, environment

EDITS = {
    "types.py": (
        '    route_problem: str = ""\n',
        '    effort: float = 0.0\n    route_problem: str = ""\n',
    ),
    "trainer/rollout.py": (
        "    held: Mapping[int, Completion]\n",
        "    effort: Tensor = field(metadata=_column(lambda one, _: one.effort, torch.float64))\n"
        "    held: Mapping[int, Completion]\n",
    ),
}
PROGRAM = """
import torch
from megatron_fspo.rollout.client.scatter import _decode, _encode
from megatron_fspo.trainer.rollout import COLUMNS, describe, join, make_rollout, select
from megatron_fspo.types import Completion, Prompt

one = Completion(token_ids=[1], log_probs=[0.0], finish_reason="stop", weight_version=0, effort=0.75)
assert _decode(_encode([one])) == [one]
table = torch.tensor([describe(one, 0), describe(one, 1)], dtype=torch.float64)
rollout = make_rollout([Prompt(index=0, token_ids=(1,), text="", answer="")], 2, table, {0: one})
assert select(join([rollout, rollout]), [1]).effort.tolist() == [0.75, 0.75] and "effort" in COLUMNS
"""


def test_a_new_scalar_is_written_in_two_places(tmp_path: Path) -> None:
    shutil.copytree(REPO / "megatron_fspo", tmp_path / "megatron_fspo")
    for name, (before, after) in EDITS.items():
        path = tmp_path / "megatron_fspo" / name
        text = path.read_text()
        assert text.count(before) == 1, name
        path.write_text(text.replace(before, after))
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
