"""The programs where Transformer Engine is installed or broken, on GPUs of all ages or none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch import REPO, forked, why
from runs import CONFIG, PROGRAM, run, trained

FP8_RUN = ("--config", str(CONFIG), "--nproc", "2", "--model.dtype", "bfloat16", "--fp8.recipe")
BROKEN = {
    "meta": "empty `transformer-engine` meta package",
    "missing": "Could not find shared object file",
    "mismatch": "package version mismatch",
}
"""Damage of the installation → Transformer Engine's message."""


def program(*words: str, **machine: str) -> subprocess.CompletedProcess[str]:
    """``megatron-fspo``, on a machine of which :mod:`fake_gpu` is told; its start is shared."""
    return forked([*PROGRAM, *words], nproc=0, timeout=120, **machine)


def refused(*words: str, **machine: str) -> str:
    """The one line that it says."""
    done = program(*words, **machine)
    assert done.returncode == 2, why(done.stderr)
    (line,) = done.stderr.splitlines()
    return line


def doctor(*words: str, **machine: str) -> dict[str, Any]:
    done = program("doctor", "--json", *words, **machine)
    assert done.returncode == 0, why(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("gpu", "runs"),
    [
        ("ampere", set()),
        ("ada", {"tensorwise"}),
        ("hopper", {"tensorwise", "blockwise"}),
        ("blackwell", {"tensorwise", "blockwise", "mxfp8"}),
    ],
)
def test_doctor_says_which_fp8_a_gpu_runs_and_why_not(gpu: str, runs: set[str]) -> None:
    found = doctor(**({} if gpu == "hopper" else {"FAKE_GPU": gpu}))  # the default has a process already
    assert found["use"]["layers"] == "transformer_engine"
    engine = found["transformer engine"]
    assert engine["version"] == found["packages"]["transformer-engine"] == "2.20.2"
    assert engine["cuDNN"] == "9.20.0"
    recipes = {name.removeprefix("FP8 "): said for name, said in engine.items() if name.startswith("FP8 ")}
    assert {recipe for recipe, said in recipes.items() if said == "runs"} == runs
    assert all("capability" in said for recipe, said in recipes.items() if recipe not in runs)


def test_doctor_says_which_attention_the_run_gets(tmp_path: Path) -> None:
    text = CONFIG.read_text(encoding="utf-8").replace("tensor = 2", "context = 2")
    (tmp_path / "run.toml").write_text(text.replace("sequence = true\n", ""), encoding="utf-8")
    # The double has neither cuDNN nor flash-attn; what is left knows no context parallel.
    assert doctor()["transformer engine"]["attention of Qwen3-8B"] == "unfused"
    found = doctor("--config", str(tmp_path / "run.toml"))
    assert found["transformer engine"]["attention of the run"] == "none"


@pytest.mark.parametrize("tex", BROKEN)
def test_a_broken_installation_is_named_and_ends_no_program(tex: str) -> None:
    said, found = BROKEN[tex], doctor(FAKE_TEX=tex)
    (missing,) = (item for item in found["missing"] if item.startswith("Transformer Engine"))
    assert said in missing
    assert found["use"]["layers"] == "local" and found["transformer engine"] == {}
    # A run on GPUs asks for it, and does not fall back; nor from FP8 to bf16.
    line = refused("train", *FP8_RUN, "tensorwise", FAKE_TEX=tex)
    assert said in line and "model.layers = transformer_engine" in line


@pytest.mark.parametrize(
    ("words", "machine", "said"),
    [
        (["tensorwise"], {"FAKE_TEX": "none"}, "Transformer Engine is not installed"),
        (["tensorwise"], {"FAKE_GPU": "ampere"}, "a fake ampere: Device compute capability 8.9 or higher"),
        (["blockwise"], {"FAKE_GPU": "ada"}, "compute capability 9.0 or higher"),
        (["mxfp8"], {}, "a fake hopper: Device compute capability 10.0 or higher"),
        (["tensorwise", "--fp8.first-last-layers-bf16", "1"], {}, "leaves none of the model's 2 layers"),
    ],
)
def test_a_machine_without_it_ends_the_run_before_it_starts(
    words: list[str], machine: dict[str, str], said: str
) -> None:
    assert said in refused("train", *FP8_RUN, *words, **machine)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_model_whose_sizes_are_no_multiples_is_refused(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REPO / "examples/make_sum/checkpoint", folder)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))
    line = refused("train", *FP8_RUN, recipe, "--model.checkpoint", str(folder))
    assert "multiples of 16" in line and "intermediate_size of a rank: 132" in line


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_layers_of_transformer_engine_train_in_bfloat16_only(command: str) -> None:
    assert "model.dtype = float32" in refused(command, "--config", str(CONFIG), "--model.dtype", "float32")


def test_verify_has_no_float64_of_transformer_engine() -> None:
    assert "--dtype float64" in refused("verify", "--dtype", "float64")


def test_a_run_on_the_cpu_uses_no_kernel_of_an_installed_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KERNELS", "none")
    trained(tmp_path, "run", "--model.backend", "cpu", "--run.steps", "1", "--evaluation.every", "0")


def test_what_the_lane_puts_in_place_of_kernels_is_used_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would see a kernel."""
    monkeypatch.setenv("FAKE_KERNELS", "none")
    done = run(tmp_path, "run", "--model.dtype", "bfloat16", "--run.steps", "1", "--evaluation.every", "0")
    assert done.returncode != 0
    assert "of Transformer Engine's extension runs on a GPU only" in done.stderr
