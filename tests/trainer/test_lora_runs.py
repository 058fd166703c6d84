"""Runs that train adapters: what moves, what is written, and how they go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch import REPO
from megatron_fspo.weights.chunks import ChunkReader
from runs import rows, run, trained

RANK = 4
WORDS = [
    *("--lora.rank", str(RANK), "--lora.alpha", "8", "--loss.calibrate", "0", "--optimizer.lr", "1e-3"),
    *("--evaluation.every", "0", "--checkpoint.every", "2", "--run.steps", "4", "--log.wandb", "off"),
]
ONE = ["--parallel.tensor", "1", "--parallel.sequence", "false"]
BASE = REPO / "examples/make_sum/checkpoint/model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``: four steps, in one go."""
    folder = tmp_path_factory.mktemp("lora")
    trained(folder, "whole", *WORDS, *ONE, nproc=1, DRAW_REPORT="1")
    return folder


def test_the_export_is_the_base_with_the_adapters(made: Path) -> None:
    base, merged = load_file(BASE), load_file(made / "whole/hf/model.safetensors")
    adapter = load_file(made / "whole/adapter/adapter_model.safetensors")
    config = json.loads((made / "whole/adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert config["r"] == RANK and config["lora_alpha"] == 8.0
    changed = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in adapter:
            assert torch.equal(merged[name], weight), f"{name} is frozen"
            continue
        a, b = (adapter.pop(f"{stem}.lora_{factor}.weight").double() for factor in "AB")
        assert a.shape[0] == b.shape[1] == RANK and b.abs().max() > 0
        torch.testing.assert_close(merged[name], (weight.double() + 2.0 * b @ a).float(), rtol=0, atol=1e-7)
        changed += 1
    assert not adapter and changed == 7 * 2
    assert {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")} == {
        *config["target_modules"]
    }


def test_a_checkpoint_holds_adapters_only(made: Path) -> None:
    reader = ChunkReader(made / "whole/checkpoints/step_000004/torch_dist")
    layers = 2
    assert reader.shape("decoder.layers.mlp.linear_fc2.adapters.down.a") == (layers, RANK, 256)
    assert "decoder.layers.mlp.linear_fc2.weight" not in reader
    assert "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.adapters.v.b" in reader


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_resumed_run_ends_as_the_one_in_one_go(made: Path, nproc: int) -> None:
    """On one rank to the last bit; under tensor and sequence parallel up to rounding."""
    name = f"on_{nproc}"
    shutil.copytree(made / "whole", made / name)
    shutil.rmtree(made / name / "checkpoints/step_000004")
    layout = ONE if nproc == 1 else ["--parallel.tensor", "2", "--parallel.sequence", "true"]
    trained(made, name, *WORDS, *layout, "--resume", "auto", nproc=nproc)
    want, got = (
        load_file(made / run_name / "adapter/adapter_model.safetensors") for run_name in ("whole", name)
    )
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=0 if nproc == 1 else 2e-5, msg=key)
    assert [row["step"] for row in rows(made, name)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("keys", "name"),
    [(["--lora.alpha", "64"], "adapters.scale"), (["--lora.targets", '["q", "v"]'], "adapters.targets")],
)
def test_a_resume_with_other_adapters_is_refused(made: Path, keys: list[str], name: str) -> None:
    before = sorted(path.name for path in (made / "whole/checkpoints").iterdir())
    done = run(made, "whole", *WORDS, *ONE, "--run.steps", "5", *keys, "--resume", "auto", nproc=1)
    assert done.returncode == 2 and f"its weights are for {name} = " in done.stderr
    assert sorted(path.name for path in (made / "whole/checkpoints").iterdir()) == before


def test_merging_into_bfloat16_is_said_to_lose_some(made: Path) -> None:
    """As much as the files show: of an update of 1e-4 much less than one of bfloat16's steps is left."""
    words = [*WORDS, *ONE, "--model.dtype", "bfloat16", "--optimizer.lr", "1e-5"]
    lines = trained(made, "rounded", *words, nproc=1).splitlines()
    (said,) = (line for line in lines if "rounding lost" in line)
    base, hf = load_file(BASE), load_file(made / "rounded/hf/model.safetensors")
    adapter = load_file(made / "rounded/adapter/adapter_model.safetensors")
    lost = added = 0.0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            a, b = (adapter[f"{stem}.lora_{factor}.weight"].double() for factor in "AB")
            change = hf[name].double() - weight.bfloat16().double()
            lost += (change - 2.0 * b @ a).square().sum().item()
            added += (2.0 * b @ a).square().sum().item()
    assert 0.05 < (lost / added) ** 0.5 < 1.5
    assert f"{(lost / added) ** 0.5:.1%}" in said


def test_a_run_begins_with_the_adapters_of_a_folder(made: Path) -> None:
    """Its first weights are those with which the other run ended."""
    words = [*WORDS, *ONE, "--lora.start", str(made / "whole/adapter")]
    trained(made, "begun", *words, "--run.steps", "1", "--optimizer.lr", "1e-30", nproc=1)
    want, got = (load_file(made / name / "adapter/adapter_model.safetensors") for name in ("whole", "begun"))
    assert want.keys() == got.keys() and all(torch.equal(got[key], value) for key, value in want.items())
    refused = run(made, "refused", *words, "--lora.rank", "8", nproc=1)
    (line,) = refused.stderr.splitlines()
    assert "rank 4 and scale 2" in line and not (made / "refused").exists()
