"""A run from a Python program: functions and rows of its own, in place of names and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import REPO, forked, why
from megatron_fspo.errors import InputError
from megatron_fspo.trainer.program import Trainer

PROGRAM = """
import sys
from megatron_fspo.trainer.program import Trainer

def short(prompt, completion, response):
    return 1 / (1 + len(response)) + len(prompt.fields)

def constant(prompt, completion, response):
    return 1.0

rows = [{"prompt": f"^{n:02}=", "answer": str(n), "extra": n} for n in range(10, 30)]
trainer = Trainer(
    "examples/own_task/run.toml",
    reward={short: 2.0, constant: 0.5},
    prompts=rows,
    run={"steps": 2, "folder": sys.argv[1], "name": "mine"},
    model={"checkpoint": "examples/make_sum/checkpoint", "backend": "cpu"},
    rollout={"prompts": 4, "samples": 4, "max_response_tokens": 16},
    batch={"mini_batches": 2},
    loss={"calibrate": 0},
)
print("folder", trainer.train())
"""


@pytest.mark.slow
def test_functions_and_rows_of_a_program_are_trained_on(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = forked([str(script), str(tmp_path)], nproc=0)
    assert result.returncode == 0, why(result.stderr)
    folder = tmp_path / "mine"
    assert f"folder {folder}" in result.stdout and (folder / "hf/model.safetensors").is_file()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    # prompt, answer and extra: 3 and at most 1 for the length, twice; and half of 1
    assert all(6.5 < row["critic/rewards/mean"] < 8.5 for row in rows)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InputError, match=r"run\.stps.*did you mean run\.steps"):
        Trainer(REPO / "examples/make_sum/run.toml", run={"stps": 3})

    def reward(*_: object) -> float:
        return 0.0

    first, reward.__name__ = reward, "same"

    def second(*_: object) -> float:
        return 0.0

    second.__name__ = "same"
    with pytest.raises(InputError, match="one name"):
        Trainer(REPO / "examples/make_sum/run.toml", reward={first: 1.0, second: 1.0})
    first.__name__ = "exact_match"
    with pytest.raises(InputError, match="registered twice"):
        Trainer(REPO / "examples/make_sum/run.toml", reward=first)
    with pytest.raises(InputError, match="at least one function"):
        Trainer(REPO / "examples/make_sum/run.toml", reward={})
