"""Ranks that do not have the same run in hand are refused before the first step, by name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.job.consistency import difference, facts
from megatron_fspo.job.rank_status import named_ranks
from runs import faulty

MAKE_SUM = REPO / "examples/make_sum"


def test_what_differs_is_named_with_its_ranks() -> None:
    every = [("node-a", {"x": "1", "y": "same"})] * 4 + [("node-b", {"x": "2", "y": "same"})] * 4
    assert difference(every) == "x differs between ranks: 1 on ranks 0-3 (node-a); 2 on ranks 4-7 (node-b)"
    assert difference(every[:4]) is None
    older = ("node-c", {"y": "same"})
    assert difference([every[0], older]) == (
        "x differs between ranks: 1 on rank 0 (node-a); none on rank 1 (node-c)"
    )


def test_ranks_are_named_in_ranges() -> None:
    assert named_ranks([3]) == "rank 3" and named_ranks([0, 1, 2, 8]) == "ranks 0-2, 8"
    assert named_ranks(range(0, 20, 2)) == "ranks 0, 2, 4, 6, 8, 5 more ranges"


@pytest.mark.parametrize("name", ["tokenizer.model", "merges.txt", "tokenizer.json", "chat_template.jinja"])
def test_every_file_of_a_tokenizer_is_compared(tmp_path: Path, name: str) -> None:
    key = "the configuration and tokenizer in model.checkpoint"
    config = load_config(MAKE_SUM / "run.toml", ["--model.checkpoint", str(tmp_path)])
    seen = {facts(config, trains=False)[key]}
    for text in ("one", "other"):
        (tmp_path / name).write_text(text)
        seen.add(facts(config, trains=False)[key])
    assert len(seen) == 3


def train(nodes: Path, folder: str, validation: str) -> subprocess.CompletedProcess[str]:
    """On two ranks, each in a folder of its own."""
    for rank in range(2):
        (nodes / f"node{rank}").mkdir(exist_ok=True)
    files = f"--model.checkpoint {MAKE_SUM}/checkpoint --data.train {MAKE_SUM}/train.jsonl --run.steps 1"
    return faulty(
        Path(folder), "one", ["own_folder", str(nodes)], *files.split(), "--data.validation", validation
    )


def test_a_relative_folder_that_is_not_shared(tmp_path: Path) -> None:
    result = train(tmp_path, "runs", f"{MAKE_SUM}/validation.jsonl")
    assert result.returncode != 0
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("megatron-fspo: run.folder")]
    assert "in runs/one that rank 1 (" in line and f"started in {tmp_path}/node1) cannot see" in line
    assert not any((tmp_path / f"node{rank}/runs").exists() for rank in range(2)), "something was written"


def test_data_that_differs(tmp_path: Path) -> None:
    lines = (MAKE_SUM / "validation.jsonl").read_text().splitlines(keepends=True)
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}/data.jsonl").write_text("".join(lines[rank:]))
    result = train(tmp_path, str(tmp_path / "runs"), "data.jsonl")
    assert result.returncode != 0
    assert "the file of data.validation, data.jsonl, differs between ranks: SHA-256" in result.stderr
    assert "on rank 0 (" in result.stderr and "on rank 1 (" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_rank_without_the_heads_kernels(tmp_path: Path) -> None:
    """It would compute log-probs otherwise, more slowly, and all would wait for it."""
    result = faulty(tmp_path, "one", ["no_kernels", "1"])
    assert result.returncode != 0
    want = (
        r"the log-prob head \(model.head = torch .*\) differs between ranks: as configured on rank 0 \(.*\); "
    )
    assert re.search(want + r"no ptxas on rank 1 \(", result.stderr)
    assert not (tmp_path / "one").exists()


@pytest.mark.slow
def test_the_folder_for_dumps_of_a_hang_is_there_and_makes_no_run(tmp_path: Path) -> None:
    """A folder that holds something is another run's, unless it is resumed."""
    hang = tmp_path / "one/hang"
    result = faulty(tmp_path, "one", ["on_nccl", str(hang)], "--run.steps", "1", "--evaluation.every", "0")
    assert result.returncode == 0, result.stderr
    assert hang.is_dir()
