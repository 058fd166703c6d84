"""Damaged or unsupported checkpoints: refused in one line that names the file and tensor or key; no trace."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights_helpers import (
    INDEX,
    ONE,
    Damage,
    assert_bits,
    config,
    cut,
    edit_config,
    edit_tensor,
    export,
    load_ranks,
    megatron_shapes,
    put,
    refused,
    save_model,
    tensors_of,
    to_hf,
    to_megatron,
)

from megatron_fspo.weights import Architecture, check_tensor_parallel, read_architecture

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.0.self_attn.k_norm.weight"


def load(folder: Path, tied: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = megatron_shapes(4, 2, 1, 1280, tied=tied)
    return load_ranks(folder, shapes, 1, 1280, dtype=dtype)[0][0]


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound / "hf", tmp_path / "hf")


# Values that a key of config.json cannot have; ... where it is missing.
CONFIGS: list[tuple[str, Any]] = [
    ("model_type", "gpt2"),
    ("model_type", ...),
    ("tie_word_embeddings", None),
    ("head_dim", "6"),
    ("vocab_size", True),
    ("num_hidden_layers", 0),
    *(("num_hidden_layers", size) for size in (10_001, 10**7, 2**31)),
    *((key, size) for key in ("hidden_size", "vocab_size", "head_dim") for size in (-1, 2**24 + 1, 10**400)),
    *(("rms_norm_eps", eps) for eps in (0, -1.0, math.nan, math.inf, "1e-6", True, None)),
    *(("layer_types", kinds) for kinds in (5, {"a": 1}, "full_attention")),
    ("num_key_value_heads", 3),
    ("attention_bias", True),
    ("hidden_act", "gelu"),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("quantization_config", {"quant_method": "fp8"}),
    ("rope_theta", 5e5),  # rope_parameters has another
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e6}),
    ("partial_rotary_factor", 0.5),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("dtype", "int8"),
    ("dtype", ...),
]


@pytest.mark.parametrize(("key", "value"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_is_refused(folder: Path, key: str, value: Any) -> None:
    edit_config(folder, **{key: value})
    refused(lambda: read_architecture(folder), folder, f"{folder / 'config.json'}: {key} ")


@pytest.mark.parametrize("theta", [..., -1, 0, 0.5, math.inf, math.nan, 10**400, [1e4], "1e4", True])
def test_a_theta_that_is_none_is_refused(folder: Path, theta: Any) -> None:
    edit_config(folder, rope_parameters=..., rope_theta=theta)
    refused(lambda: read_architecture(folder), folder, f"{folder / 'config.json'}: rope_theta ")


@pytest.mark.parametrize("content", [None, b'{"model_type": ', b"\xff\xfe{}", b"[]", b"[" * 100_000])
def test_a_config_that_is_none_is_refused(folder: Path, content: bytes | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    refused(lambda: read_architecture(folder), folder, f"{folder / 'config.json'} ")


def test_config_of_transformers_4_and_5_read_the_same(folder: Path) -> None:
    five = read_architecture(folder)
    edit_config(
        folder, rope_parameters=..., rope_theta=1e4, rope_scaling=None, dtype=..., torch_dtype="float32"
    )
    assert read_architecture(folder) == five
    assert five == Architecture(
        model_type="qwen3", num_layers=2, hidden_size=20, num_heads=4, num_kv_heads=2, head_dim=6,
        ffn_size=24, vocab_size=1237, tied=False, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=128, dtype=torch.float32,
    )  # fmt: skip


def shard(folder: Path) -> dict[str, str]:
    """Rewrite the checkpoint as two files and an index; returns the index's map."""
    tensors = load_file(folder / ONE)
    (folder / ONE).unlink()
    weight_map = {}
    for file, names in (("a.safetensors", sorted(tensors)[::2]), ("b.safetensors", sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Damage:
    return lambda folder: change(folder, shard(folder))


def add_to_b(folder: Path, name: str) -> None:
    tensors = load_file(folder / "b.safetensors")
    save_file(tensors | {name: torch.zeros(2)}, folder / "b.safetensors")


# Damage, and what the error names.
FILES: dict[str, tuple[Damage, list[str]]] = {
    "no weights": (lambda f: (f / ONE).unlink(), ["/hf has neither"]),
    "truncated data": (cut(-100), [f"{ONE} is truncated"]),
    "empty file": (cut(0), [f"{ONE} is truncated"]),
    "header longer than memory": (
        lambda f: (f / ONE).write_bytes(b"\xff" * 8 + (f / ONE).read_bytes()[8:]), [f"{ONE} is truncated"],
    ),
    "a pickle": (lambda f: torch.save({"w": 1}, f / ONE), [f"{ONE} is truncated"]),
    "missing tensor": (edit_tensor(Q, lambda t: None), [f"has no tensor {Q}, "]),
    "extra tensor": (edit_tensor("score.weight", lambda t: t), [f"{ONE} has score.weight"]),
    "extra layer": (edit_tensor(Q.replace(".1.", ".2."), lambda t: t), [f"{ONE} has model.layers.2.self"]),
    "fewer layers in the config": (config(num_hidden_layers=1), [f"{ONE} has model.layers.1."]),
    "transposed": (
        edit_tensor(Q, lambda t: t.T.contiguous()), [f"{ONE}: {Q} has", "(20, 24)", "(24, 20)"],
    ),
    "another vocabulary": (
        config(vocab_size=1236), [f"{ONE}: lm_head.weight has", "(1237, 20)", "(1236, 20)"],
    ),
    "config that ties what differs": (
        config(tie_word_embeddings=True), [ONE, "lm_head.weight differs from model.embed_tokens.weight"],
    ),
    "config of another family": (config(model_type="llama"), [f"{ONE} has model.layers.0.self_attn.k_norm"]),
    "NaN": (edit_tensor(Q, put(torch.nan)), [f"{ONE}: {Q} is not finite in float32"]),
    "infinity in half precision": (
        edit_tensor(NORM, lambda t: (t * 1e9).half()), [f"{ONE}: {NORM} is not finite in float"],
    ),
    "integers": (edit_tensor(Q, lambda t: t.to(torch.int8)), [f"{Q} in", f"{ONE} is I8"]),
    "stale single file": (
        sharded(lambda f, m: shutil.copy(f / "a.safetensors", f / ONE)), [f"has both {ONE} and {INDEX}"],
    ),
    "missing shard": (sharded(lambda f, m: (f / "b.safetensors").unlink()), ["b.safetensors is", INDEX]),
    "index names a lost tensor": (
        sharded(lambda f, m: write_index(f, m | {"x": "a.safetensors"})), [INDEX, "a.safetensors", "x"],
    ),
    "index moves a tensor": (
        sharded(lambda f, m: write_index(f, m | {min(m): "b.safetensors"})), [INDEX, "b.safetensors", "lm_"],
    ),
    "index forgets a tensor": (
        sharded(lambda f, m: write_index(f, {n: m[n] for n in m if n != Q})), [INDEX, f"does not list {Q}"],
    ),
    "tensor in two files": (
        sharded(lambda f, m: add_to_b(f, min(m))), ["lm_head.weight", "a.safetensors and", "b.safetensors"],
    ),
    "index out of the folder": (
        sharded(lambda f, m: write_index(f, m | {"x": "../a.safetensors"})), [INDEX, "'../a.safetensors'"],
    ),
    "empty index": (sharded(lambda f, m: write_index(f, {})), [INDEX, "weight_map"]),
    "index without a map": (sharded(lambda f, m: (f / INDEX).write_text("{}")), [INDEX, "weight_map"]),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), FILES.values(), ids=FILES)
def test_files_are_refused(folder: Path, damage: Damage, message: list[str]) -> None:
    damage(folder)
    refused(lambda: load(folder), folder, str(folder), *message)
    refused(lambda: to_megatron(folder, folder.with_name("out")), folder.parent, str(folder), *message)


EXPERT = "model.layers.0.mlp.experts.2."


@pytest.mark.parametrize(
    "damage",
    [edit_tensor(f"{EXPERT}up_proj.weight", lambda t: None), config(num_experts=2, num_local_experts=2)],
    ids=["missing expert", "an expert less in the config"],
)
def test_experts_are_counted(sound: Path, tmp_path: Path, damage: Damage) -> None:
    folder = shutil.copytree(sound / "experts", tmp_path / "experts")
    damage(folder)
    refused(lambda: to_megatron(folder, tmp_path / "out"), tmp_path, str(folder), EXPERT)


def test_mixtral_may_have_a_window(tmp_path: Path) -> None:
    save_model(tmp_path / "mixtral", "mixtral")
    assert read_architecture(tmp_path / "mixtral").window is None
    edit_config(tmp_path / "mixtral", sliding_window=4096)
    assert read_architecture(tmp_path / "mixtral").window == 4096


MTP = "model.layers.2."
FURTHER = {f"{MTP}eh_proj.weight": 2, f"{MTP}shared_head.norm.weight": 1, f"{MTP}self_attn.o_proj.weight": 2}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "hf"
    original = save_model(folder, family)
    further = {
        name: torch.full((3,) * dims, torch.nan, dtype=torch.float64) for name, dims in FURTHER.items()
    }
    save_file(original | further, folder / ONE)
    edit_config(folder, num_nextn_predict_layers=..., num_mtp_layers=...)
    refused(lambda: to_megatron(folder, tmp_path / "out"), tmp_path, ONE, f"has {MTP}")
    edit_config(folder, num_nextn_predict_layers=1)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), original)
    beyond = {f"{MTP.replace('2', '3')}eh_proj.weight": torch.ones(3)}
    save_file(original | further | beyond, folder / ONE)
    refused(lambda: to_megatron(folder, tmp_path / "out"), tmp_path, ONE, *beyond)


def test_sharded_files_load_like_one(folder: Path) -> None:
    single = load(folder)
    shard(folder)
    assert_bits(load(folder), single)


def test_values_too_large_for_the_model_are_refused(folder: Path) -> None:
    edit_tensor(Q, put(1e5))(folder)
    load(folder, dtype=torch.bfloat16)
    refused(lambda: load(folder, dtype=torch.float16), folder, ONE, f"{Q} is not finite in float16")


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "hf"
    original = save_model(folder, tied=True)
    repeated = original["model.embed_tokens.weight"].clone()
    save_file(original | {"lm_head.weight": repeated}, folder / ONE)
    with caplog.at_level(logging.INFO, "megatron_fspo"):
        parameters = load(folder, tied=True)
    assert "lm_head.weight duplicates the tied model.embed_tokens.weight" in caplog.text
    assert_bits(dict(export(folder, [parameters])), original)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), original)

    repeated[1236, 19] += 1e-3
    save_file(original | {"lm_head.weight": repeated}, folder / ONE)
    refused(lambda: load(folder, tied=True), folder, ONE, "lm_head.weight differs")
    save_file(original | {"lm_head.weight": repeated[:9]}, folder / ONE)
    refused(lambda: load(folder, tied=True), folder, ONE, "lm_head.weight has shape (9, 20)")


@pytest.mark.parametrize(
    ("sizes", "tp", "padded", "named"),
    [
        ((4, 4, 24), 0, None, "0"),
        ((4, 2, 24), 4, None, "num_key_value_heads 2"),
        ((6, 6, 24), 4, None, "num_attention_heads 6"),
        ((4, 4, 22), 4, None, "intermediate_size 22"),
        ((4, 4, 24), 4, 1236, "padded vocabulary 1236"),
        ((4, 4, 24), 4, 1238, "padded vocabulary 1238"),
    ],
)
def test_indivisible_layouts_are_refused(
    tmp_path: Path, sizes: tuple[int, int, int], tp: int, padded: int | None, named: str
) -> None:
    heads, kv_heads, ffn = sizes
    arch = Architecture(
        model_type="qwen3", num_layers=2, hidden_size=20, num_heads=heads, num_kv_heads=kv_heads, head_dim=6,
        ffn_size=ffn, vocab_size=1237, tied=False, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=128, dtype=torch.float32,
    )  # fmt: skip
    check_tensor_parallel(arch, 2, 1238)
    refused(lambda: check_tensor_parallel(arch, tp, padded), tmp_path, named)
