"""examples/qwen3_8b: its configurations, the data script, and the launch scripts' words."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.data import TEMPLATES
from megatron_fspo.config.loading import load_config

EXAMPLE = REPO / "examples/qwen3_8b"
# Another example has a prepare.py too.
SPEC = importlib.util.spec_from_file_location("qwen3_8b_prepare", EXAMPLE / "prepare.py")
assert SPEC is not None and SPEC.loader is not None
prepare = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = prepare
SPEC.loader.exec_module(prepare)

LOSSES, LAYOUTS = ("rloo", "gspo", "ctpo"), ("one_node", "colocated", "two_nodes", "four_nodes")


def config(*layers: str) -> Config:
    return load_config([EXAMPLE / f"{name}.toml" for name in ("run", *layers)])


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLE / f"{name}.toml").read_text(encoding="utf-8"))


def test_files_of_a_loss_and_of_a_layout_change_nothing_else() -> None:
    for loss in LOSSES:
        assert set(read(loss)) == {"run", "loss"} and set(read(loss)["run"]) == {"name"}
        assert config(loss).loss.name == config(loss).run.name == loss
    method = {"rollout.engine", "batch.max_tokens"}
    method |= {f"vllm.{key}" for key in ("urls", "transfer", "colocated", "in_flight")}
    for layout in LAYOUTS:
        changed = {f"{section}.{key}" for section, keys in read(layout).items() for key in keys}
        assert {key for key in changed if not key.startswith("parallel.")} <= method


def test_all_files_go_together() -> None:
    for loss, layout, precision in product(("", *LOSSES), ("", *LAYOUTS), ("", "fp8")):
        found = config(*filter(None, (loss, layout, precision)))
        assert (found.fp8.recipe != "none") == bool(precision) and found.loss.name == (loss or "fspo")
        assert found.rollout.engine == ("vllm" if layout else config().rollout.engine)
        assert found.rollout.prompts * found.rollout.samples == 1024
        assert 8 % found.parallel.model_size == 0, "a model is within a node"
    for layout in set(LAYOUTS) - {"colocated"}:
        assert config(layout, "ahead").rollout.max_staleness == 1


def test_the_other_model_changes_no_method() -> None:
    files = [EXAMPLE / "run.toml", REPO / "examples/qwen3_1_7b/run.toml"]
    ours, other = config().model_dump(), load_config(files).model_dump()
    for section in ("data", "reward", "loss", "optimizer", "evaluation", "correction"):
        assert ours[section] == other[section]
    assert load_config(files).parallel.model_size == 1
    assert other["run"]["folder"] != ours["run"]["folder"]


# Rows as the public files have them, with problems of our own.


def dapo(question: str, answer: str, index: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": TEMPLATES["dapo"].replace("{prompt}", question)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


LONG = (
    "Nora writes the numbers from $1$ to $90$ on cards and puts them into a hat. She draws three cards, one "
    "after the other, and adds them. How many sums that are a multiple of $\\frac{18}{3}$ can she get?"
)
RESPELLED = (
    LONG.replace("$\\frac{18}{3}$", "\\(\\dfrac{ 18 }{3}\\)").replace("$90$", "90").replace("Nora", "NORA")
)
TRAIN = [
    dapo("What is the least prime above 90?", "97", "a"),
    dapo("What is the least prime above 90?", "97", "a"),
    dapo("What is the least prime above 90? ", "97", "b"),
    dapo("How many edges has a cube?", "12", "c"),
    dapo("How many edges has a cube?", "8", "d"),
    dapo("Name the empty set.", "\u2205", "e"),
    dapo(f"{RESPELLED} Give it as an integer.", "46", "f"),
    dapo("How many sides has a pentagon?", "5", "g"),
    dapo("How many sides has a pentagon? And how many has a hexagon? Add both numbers.", "11", "h"),
]
HELD_OUT = {
    "math500": [
        {"problem": "Write $\\frac{6}{8}$ in lowest terms.", "solution": "-", "answer": "\\frac{3}{4}",
         "subject": "Prealgebra", "level": 1, "unique_id": "ours/1"},
    ],
    "amc23": [{"id": 0, "question": "How many sides has a pentagon?", "answer": 5.0}],
    "aime24": [{"id": 60, "problem": LONG, "solution": "-", "answer": "046", "url": "-", "year": "2024"}],
    "aime25": [{"problem": "Find the remainder when $7^{10}$ is divided by $48$.", "answer": "1", "id": "1"}],
}  # fmt: skip


def public(folder: Path, **changed: list[dict[str, Any]]) -> list[str]:
    """The files, and the words that name them."""
    words = []
    for name, rows in {"train": TRAIN, **HELD_OUT, **changed}.items():
        path = folder / f"{name}.{'jsonl' if name in ('math500', 'aime25') else 'parquet'}"
        if path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        words += [f"--{name}", str(path)]
    return [*words, "--out", str(folder / "data")]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_is_left_of_the_public_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main([*public(tmp_path), "--any-count"]) == 0
    data = tmp_path / "data"
    assert lines(data / "train.jsonl") == [
        {"prompt": "What is the least prime above 90?", "answer": "97", "id": "a"},
        {"prompt": TRAIN[8]["prompt"][0]["content"].split("\n\n")[1], "answer": "11", "id": "h"},
    ]
    why_not = {row["id"]: row["why"] for row in lines(data / "left_out.jsonl")}
    assert why_not == {
        "c": "has the answers '12', '8'",
        "e": "has the answer '\u2205': no response can be graded as right",
        "f": "is in aime24 60",
        "g": "is in amc23 0",
    }
    assert [row["answer"] for name in HELD_OUT for row in lines(data / f"{name}.jsonl")] == [
        "\\frac{3}{4}", "5.0", "046", "1",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "9 rows          2 repeated      4 left out       2 prompts" in said
    assert "0 of math500, 1 of amc23, 1 of aime24, 0 of aime25" in said


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "train.parquet: 6 different prompts in 9 rows, but train has 17,000 to 18,000"),
        ({"train": [{"prompt": "?", "answer": "1"}]}, "train.parquet: row 1: no key 'reward_model."),
        ({"aime25": [{"problem": "?", "answer": None}]}, "aime25.jsonl:1: 'answer' must be"),
        (
            {"train": [dapo("x", "1", "a") | {"prompt": [{"role": "user", "content": "bare"}]}]},
            "train.parquet: row 1: 'prompt' has no question",
        ),
    ],
)
def test_other_files_are_refused_in_a_line(
    changed: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main([*public(tmp_path, **changed), *(["--any-count"] if changed else [])]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and told in said
    assert not (tmp_path / "data").exists()


def test_a_problem_that_cannot_be_evaluated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    amc = [{"id": 7, "question": "Which set is empty?", "answer": "\u2205"}]
    assert prepare.main([*public(tmp_path, amc23=amc), "--any-count"]) == 2
    assert "7 has the answer '\u2205'" in capsys.readouterr().err


def test_a_closing_sentence_is_no_overlap() -> None:
    closing = " The answer is $\\frac{m}{n}$, where $m$ and $n$ are relatively prime integers. Find $m+n$."
    one, other = prepare.Prepared(), prepare.Prepared()
    one.kept = [{"prompt": f"Roll two dice until both show a six.{closing}", "id": "1", "answer": "1"}]
    other.kept = [{"prompt": f"A circle touches three sides of it.{closing}", "id": "2", "answer": "1"}]
    assert not prepare.without_overlap(one, {"aime24": other}) and len(one.kept) == 1
