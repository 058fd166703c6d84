"""Plans of models whose layers differ, and of those whose attention does, from published configs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hub_configs import BILLIONS, CONFIGS
from launch import REPO
from megatron_fspo.cli import main
from megatron_fspo.config import Parallel
from megatron_fspo.lab.plan.activations import activations, kept, layer_bytes, layer_tensors
from megatron_fspo.lab.plan.shape import PlannedPack, Shape, stage_parameters
from megatron_fspo.lab.plan.state import cached_values, kv_bytes, model_values, state_bytes, within_window
from megatron_fspo.weights import Architecture, read_architecture
from megatron_fspo.weights.flops import forward_flops

PACK = PlannedPack(lengths=(1024,), scored=512)
BOTH: tuple[Any, ...] = ("local", "transformer_engine")


@cache
def arch_of(model: str) -> Architecture:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[model]))
        return read_architecture(folder)


def shape(model: str, layers: Any = "transformer_engine", world: int = 1, **parallel: Any) -> Shape:
    return Shape(
        arch=arch_of(model), parallel=Parallel(**parallel), world=world, dtype=torch.bfloat16, layers=layers,
        device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("model", CONFIGS)
def test_a_model_has_the_published_number_of_parameters(model: str) -> None:
    assert model_values(arch_of(model)) / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)


@pytest.mark.parametrize("layers", BOTH)
@pytest.mark.parametrize("model", CONFIGS)
def test_ranks_hold_the_whole_model(model: str, layers: Any) -> None:
    arch = arch_of(model)
    one = [p for chunk in stage_parameters(shape(model, layers), 0) for p in chunk]
    sigmoid = arch.experts is not None and arch.experts.sigmoid
    biases = arch.num_experts * (arch.num_layers - arch.dense_layers) if sigmoid else 0  # in a buffer
    assert sum(p.count for p in one) == model_values(arch) - biases
    assert len({p.name for p in one}) == len(one)


def test_the_first_stage_has_the_dense_layers() -> None:
    split = shape("Moonlight-16B-A3B", world=3, pipeline=3)
    names = [{p.name for chunk in stage_parameters(split, stage) for p in chunk} for stage in range(3)]
    dense = "decoder.layers.0.mlp.linear_fc1.weight"
    assert [dense in held for held in names] == [True, False, False]
    assert [split.kinds(stage, 0) for stage in range(3)] == [{False: 1, True: 8}, {True: 9}, {True: 9}]
    assert kept(split, 1, 0, PACK) > kept(split, 0, 0, PACK)
    dense_bytes, expert_bytes = (layer_bytes(split, PACK, kind) for kind in (False, True))
    more = kept(split, 1, 0, PACK) - kept(split, 0, 0, PACK)
    assert more == pytest.approx(expert_bytes - dense_bytes + 1024 * 2048 * 2)  # and the input
    # A backward is that of the larger kind.
    stages = [activations(split, stage, PACK, 4).moments["a layer's backward"] for stage in (0, 1)]
    assert stages[0] >= stages[1]


@pytest.mark.parametrize("layers", BOTH)
def test_a_layer_saves_what_its_kind_of_attention_needs(layers: Any) -> None:
    def saved(model: str, experts: bool = False) -> dict[str, float]:
        found = layer_tensors(shape(model, layers), PACK, experts)
        return {one.what: getattr(one, layers) / 1024 / 2 for one in found}

    latent, glm = saved("DeepSeek-V3"), saved("GLM-4.5-Air", experts=True)
    oss = saved("gpt-oss-20b", experts=True)  # a trace of its step: gate and up without and with biases
    assert oss["gate and up"] == oss["clamped gate, and its sigmoid"] == 2 * 4 * 2880
    assert latent["q after RoPE"] == latent["k after RoPE"] == 128 * 192
    assert latent["v, into attention"] == 128 * (192 if layers == "local" else 128)  # padded
    assert latent["attention's output, into a linear"] == 128 * 128
    assert latent["latent q, k and v into their norms"] == 1536 + 512 + 64
    assert latent["q, k and v from their linear"] == 0
    # Eight experts and the shared one.
    assert glm["gate and up"] == 2 * 9 * 1408
    assert saved("GLM-4.5-Air")["gate and up"] == 2 * 10944
    assert glm["cos and sin of q and of k"] in (0, 4 * 64)


def test_a_recipe_of_a_hybrid_fits_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3.5-35B-A3B"]))
    files = [f"{REPO}/examples/{name}/run.toml" for name in ("qwen3_8b", "qwen3_5_35b_a3b")]
    words = ["plan", "--config", files[0], "--config", files[1], "--model", str(tmp_path)]
    words += ["--vllm.transfer", "nccl", "--servers", "4", "--vllm.urls", "['http://node1:8000']"]
    assert main([*words, "--nproc", "16"]) == 0 and main([*words, "--nproc", "8"]) == 1
    assert "the run fits" in capsys.readouterr().out


def test_a_state_does_not_grow_with_the_sequence() -> None:
    arch = arch_of("Qwen3.5-35B-A3B")
    assert state_bytes(arch, 2) == 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert within_window(arch, 9000) == 9000 and arch.softmax_layers == 10
    tokens, rows = 1000, 4
    cache = kv_bytes(shape("Qwen3.5-35B-A3B"), rows=rows, tokens=tokens)
    assert cache == rows * (10 * tokens * 2 * 2 * 256 * 2 + state_bytes(arch, 2))
    # Of a token twice as far only the 10 layers with softmax attention compute more, T each time.
    one, two = (forward_flops(arch, [0], [length]) for length in (1000, 2000))
    assert two - 2 * one == 10 * 2 * 16 * 256 * (2000**2 - 2 * 1000**2)


def test_a_cache_knows_latent_attention_and_windows() -> None:
    values = {
        (model, gpus): cached_values(arch_of(model), embedded=False, gpus=gpus)
        for model in ("DeepSeek-V3", "Mistral-7B-v0.1")
        for gpus in (1, 16)
    }
    assert [values["DeepSeek-V3", gpus] for gpus in (1, 16)] == [512 + 64] * 2
    assert [values["Mistral-7B-v0.1", gpus] for gpus in (1, 16)] == [2 * 8 * 128, 2 * 128]
    assert cached_values(arch_of("DeepSeek-V3"), embedded=True, gpus=8) == 16 * (192 + 128)
    assert [within_window(arch_of("Mistral-7B-v0.1"), length) for length in (100, 9000)] == [100, 4096]
    assert within_window(arch_of("Phi-4"), 9000) == 9000
