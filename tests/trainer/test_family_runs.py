"""Three steps of make-sum with a little model of every family: what is sampled is what is trained; exports;
resumed runs; adapters."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_families
from megatron_fspo.weights import MegatronReader, read_architecture
from runs import CONFIG, numbers, rows, run, trained

sys.path.insert(0, str(CONFIG.parent))

import check_export

pytestmark = pytest.mark.slow

MIXTURES = (
    *("qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight", "gpt_oss"), "qwen3_next", "qwen3_5_moe_text"
)  # fmt: skip
ADAPTED = {"qwen2_moe": "qkvo", "glm4_moe": "qkvo", "deepseek_v3": "o", "phi3": ("o", "down")}
ADAPTED |= dict.fromkeys(("gemma3_text", "olmo3", "qwen3_5_text"), ("q", "k", "v", "o", "gate", "up", "down"))
ADAPTED["gpt_oss"] = "qkvo"
WORDS = (
    "--rollout.prompts 4 --rollout.samples 4 --rollout.max-response-tokens 30 --batch.mini-batches 2 "
    "--loss.calibrate 0 --loss.entropy-coef 0.1 --loss.kl-coef 0.1 --reward.max-zero-variance-steps 0 "
    "--optimizer.lr 1e-3 --run.steps 3 --evaluation.every 3 --checkpoint.every 2 --log.wandb off "
    "--parallel.tensor 1 --parallel.sequence false"
).split()
REPLAY = "--moe.replay old_pass --moe.aux-loss-coef 0.01 --moe.z-loss-coef 0.001".split()


def train(folder: Path, family: str, name: str, *extra: str) -> Path:
    """The folder of a run of the family's checkpoint."""
    checkpoint = folder / f"{family}-checkpoint"
    if not checkpoint.exists():
        tiny_families.write(family, checkpoint)
    trained(folder, name, *WORDS, "--model.checkpoint", str(checkpoint), *extra, nproc=1)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module", params=tiny_families.NEW)
def made(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The run of a family, named like it. The routers' choices of the old pass are replayed."""
    return train(folder, request.param, request.param, *(REPLAY if request.param in MIXTURES else ()))


def test_the_first_update_is_on_policy(made: Path) -> None:
    steps = [row for row in rows(made.parent, made.name) if row["step"] and "actor/pg_loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["fspo/on_policy_abs_s_max"] == 0
        assert row["rollout/logprob_abs_diff/max"] < 5e-5
        assert math.isfinite(row["actor/pg_loss"]) and row["actor/grad_norm"] > 0
        # The reference has the weights, and the biases of its routers, of the start.
        assert 0 < row["actor/kl_loss"] < 0.5
    for row in steps if made.name in MIXTURES else ():
        # A bias may oppose the scores: then the loss is below 1, that of an even load.
        assert 0.8 < row["router/aux_loss"] < 4 and row["router/z_loss"] > 0
        assert 1 <= row["router/load_max/mean"] <= row["router/load_max"] <= 4
        assert 0 < row["router/entropy"] <= math.log(8) and 0 <= row["actor/route_flips"] < 0.5


def test_export_and_checkpoint_are_what_was_sampled_with(made: Path) -> None:
    difference, tokens = check_export.largest_difference(made)
    assert difference < 5e-5 and tokens > 100
    reader = MegatronReader(made / "checkpoints/step_000003", read_architecture(made / "hf"))
    start = load_file(made.with_name(f"{made.name}-checkpoint") / "model.safetensors")
    exported = load_file(made / "hf/model.safetensors")
    assert exported.keys() == start.keys() == reader.names()
    for name, tensor in exported.items():
        assert torch.equal(reader.read(name), tensor), name
        if ".experts." not in name:  # some expert has no token
            assert torch.equal(tensor, start[name]) == name.endswith("correction_bias"), name


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_resumed_run_ends_as_the_one_in_one_go(family: str, folder: Path) -> None:
    if not (folder / family).exists():
        train(folder, family, family, *REPLAY)
    again = shutil.copytree(folder / family, folder / f"{family}-resumed")
    shutil.rmtree(again / "checkpoints/step_000003")
    shutil.rmtree(again / "hf")
    train(folder, family, again.name, *REPLAY, "--resume")
    got, want = (numbers(rows(folder, name)[-1]) for name in (again.name, family))
    assert got == want
    files = [(folder / name / "hf/model.safetensors").read_bytes() for name in (again.name, family)]
    assert files[0] == files[1]


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_merge_into_the_export(family: str, folder: Path) -> None:
    lora = "--lora.rank 4 --lora.alpha 8 --run.steps 2 --evaluation.every 2".split()
    made = train(folder, family, f"{family}-lora", *lora)
    config = json.loads((made / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert {*config["target_modules"]} == {f"{target}_proj" for target in ADAPTED[family]}
    base = load_file(folder / f"{family}-checkpoint/model.safetensors")
    merged = load_file(made / "hf/model.safetensors")
    adapter = load_file(made / "adapter/adapter_model.safetensors")
    layers = [1 if family == "qwen3_5_text" and target in [*"qkvo"] else 2 for target in ADAPTED[family]]
    assert merged.keys() == base.keys() and len(adapter) == 2 * sum(layers)
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora"
        if f"{stem}_A.weight" not in adapter:
            assert torch.equal(merged[name], weight), name
            continue
        a, b = (adapter.pop(f"{stem}_{factor}.weight").double() for factor in "AB")
        assert b.abs().max() > 0
        torch.testing.assert_close(merged[name], (weight.double() + 2.0 * b @ a).float(), rtol=0, atol=1e-7)
    assert not adapter and check_export.largest_difference(made)[0] < 5e-5


def test_targets_without_a_matrix_in_the_files_are_refused(folder: Path) -> None:
    for family, target, legal in (
        ("phi3", "q", "o, down"),
        ("glm4", "gate", "q, k, v, o, down"),
        ("moonlight", "q", "o"),
        ("glm4_moe", "down", "q, k, v, o"),
    ):
        checkpoint = folder / f"{family}-checkpoint"
        if not checkpoint.exists():
            tiny_families.write(family, checkpoint)
        keys = ["--lora.rank", "4", "--lora.targets", f'["{target}"]', "--model.checkpoint", str(checkpoint)]
        done = run(folder, "refused", *WORDS, *keys, nproc=1)
        (line,) = done.stderr.splitlines()
        kind = "deepseek_v3" if family == "moonlight" else family
        assert line.endswith(f"lora.targets: {target}: {kind} has adapters of {legal} only")
        assert done.returncode == 2 and not (folder / "refused").exists()
