"""The command lines of tools/, which are ``megatron-fspo convert``, as a user runs them."""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import REPO, environment

TOOLS = ("convert_hf_to_megatron", "convert_megatron_to_hf", "verify_checkpoint")
Q = "model.layers.1.self_attn.q_proj.weight"


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def tool(name: str, *words: object) -> Result:
    """The program as ``python tools/…`` runs it, but in this process: torch takes seconds to import."""
    out, err, before = StringIO(), StringIO(), sys.argv
    sys.argv = [f"tools/{name}.py", *map(str, words)]
    try:
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            warnings.catch_warnings(),
            patch.dict(os.environ, environment()),  # for the ranks it starts
        ):
            runpy.run_path(str(REPO / "tools" / f"{name}.py"), run_name="__main__")
    except SystemExit as exit:
        return Result(int(exit.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("a program ends with its exit status")


def done(name: str, *words: object) -> str:
    result = tool(name, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def converted(
    random_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path, Path]]:
    """Source, Megatron checkpoint, and that exported again."""
    folder = tmp_path_factory.mktemp("converted")
    made = {}
    for name, source in random_checkpoints.items():
        made[name] = (source, folder / f"{name}-megatron", folder / f"{name}-back")
        done("convert_hf_to_megatron", source, folder / f"{name}-megatron")
        done("convert_megatron_to_hf", folder / f"{name}-megatron", folder / f"{name}-back")
    return made


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_there_and_back_again(converted: dict[str, tuple[Path, Path, Path]], name: str) -> None:
    source, megatron, back = converted[name]
    first, last = (load_file(path / "model.safetensors") for path in (source, back))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) and first[key].dtype == last[key].dtype for key in first)
    assert "bit for bit the same" in done("verify_checkpoint", source, megatron)
    report = json.loads(done("verify_checkpoint", megatron, back, "--json"))
    assert report == {"same": True, "different_tensors": []}
    for path in (megatron, back):
        assert "bit for bit the same" in done("verify_checkpoint", path)
        assert (path / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.slow
def test_log_probs_of_transformers_and_of_a_layout_are_compared(
    converted: dict[str, tuple[Path, Path, Path]],
) -> None:
    source, megatron, _ = converted["untied"]
    report = json.loads(done("verify_checkpoint", source, megatron, "--logits", "--layout", "tp2", "--json"))
    assert report["same"]
    assert [row["name"] for row in report["log_probs"]] == [
        f"{source}, Megatron tp2",
        f"{megatron}, Megatron tp2",
    ]
    assert all(0 < row["mean"] < row["max"] <= 1e-5 for row in report["log_probs"])


@pytest.mark.slow
def test_a_difference_is_named_and_is_exit_status_1(
    converted: dict[str, tuple[Path, Path, Path]], tmp_path: Path
) -> None:
    source, megatron, _ = converted["untied"]
    tensors = load_file(source / "model.safetensors")
    tensors[Q][3, 5] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in source.iterdir():
        if path.name not in ("model.safetensors", "manifest.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    result = tool("verify_checkpoint", tmp_path, megatron, "--logits")
    assert result.returncode == 1, result.stderr
    assert f"1 tensors or files differ\n  {Q}: 1 values, by up to" in result.stdout
    assert "beyond the tolerance of 0.0001" in result.stdout
    report = json.loads(tool("verify_checkpoint", tmp_path, megatron, "--json").stdout)
    assert not report["same"]
    assert report["different_tensors"][0]["name"] == Q
    (tmp_path / "LICENSE").touch()
    report = json.loads(tool("verify_checkpoint", tmp_path, megatron, "--json").stdout)
    assert [one["name"] for one in report["different_tensors"]] == [Q, "LICENSE"]


def test_files_of_a_chosen_size_and_another_dtype(
    converted: dict[str, tuple[Path, Path, Path]], tmp_path: Path
) -> None:
    source, megatron, _ = converted["tied"]
    words = ("--max-shard-size", "50000", "--dtype", "bfloat16", "--json")
    report = json.loads(done("convert_megatron_to_hf", megatron, tmp_path / "out", *words))
    assert len(report["files"]) > 1
    assert all((tmp_path / "out" / file).stat().st_size < 60_000 for file in report["files"])
    original = load_file(source / "model.safetensors")
    for file in report["files"]:
        for key, tensor in load_file(tmp_path / "out" / file).items():
            assert torch.equal(tensor, original.pop(key).bfloat16())
    assert not original
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert_hf_to_megatron", "nowhere", "out"), "nowhere/config.json"),
        (("convert_megatron_to_hf", "{hf}", "out"), "torch_dist/.metadata"),
        (("convert_megatron_to_hf", "{megatron}", "out", "--max-shard-size", "big"), "--max-shard-size big"),
        (("convert_hf_to_megatron", "{megatron}", "out"), "has neither model.safetensors nor"),
        (("verify_checkpoint",), "name a checkpoint folder"),
        (("verify_checkpoint", "{hf}", "{megatron}", "--tolerance", "nan"), "--tolerance nan"),
        (("verify_checkpoint", "{hf}"), "has no manifest"),
        (("verify_checkpoint", "{hf}", "{tied}"), "tied differ"),
        (("verify_checkpoint", "{hf}", "--logits"), "--logits"),
        (("verify_checkpoint", "{hf}", "{megatron}", "--logits", "--layout", "tp2.xp2"), "layout tp2.xp2"),
        (("verify_checkpoint", "{hf}", "{megatron}", "--logits", "--layout", "tp8"), "does not divide"),
        (("verify_checkpoint", "{hf}", "{megatron}", "--logits", "--layout", "ep2"), "parallel.expert"),
    ],
)
def test_wrong_input_is_one_line_and_exit_status_2(
    converted: dict[str, tuple[Path, Path, Path]], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    source, megatron, _ = converted["untied"]
    places = {"hf": source, "megatron": megatron, "tied": converted["tied"][0]}
    name, *others = (word.format(**places) for word in words)
    others = [str(tmp_path / word) if word in ("nowhere", "out") else word for word in others]
    result = tool(name, *others)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("megatron-fspo") and message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TOOLS)
def test_help_shows_examples(name: str) -> None:
    assert "\n    megatron-fspo convert " in done(name, "--help")
