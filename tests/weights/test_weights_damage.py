"""Damaged or unsupported checkpoints: each is refused in one line that names the file and tensor or key."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

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
    refused_without_a_trace,
    save_model,
    to_megatron,
)

from megatron_fspo.errors import InputError
from megatron_fspo.weights import Architecture, check_tensor_parallel, read_architecture, table
from megatron_fspo.weights.architecture import SUPPORTED

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.0.self_attn.k_norm.weight"


def load(folder: Path, tied: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = megatron_shapes(4, 2, 1, 1280, tied=tied)
    return load_ranks(folder, shapes, 1, 1280, dtype=dtype)[0][0]


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "hf", tied=False)
    load(tmp_path / "hf")  # sound before it is damaged
    return tmp_path / "hf"


CONFIGS: list[tuple[Damage, list[str]]] = [
    (shutil.rmtree, ["config.json not found"]),
    (lambda f: (f / "config.json").unlink(), ["config.json not found"]),
    (lambda f: (f / "config.json").write_text('{"model_type": '), ["is not JSON"]),
    (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), ["is not JSON"]),
    (lambda f: (f / "config.json").write_text("[]"), ["must hold a JSON object"]),
    (config(model_type="gpt2"), ["model_type is 'gpt2'; supported: llama, qwen2, qwen3, qwen3_moe"]),
    (config(model_type=...), ["model_type is missing"]),
    (config(num_key_value_heads=...), ["num_key_value_heads is missing"]),
    (config(tie_word_embeddings=None), ["tie_word_embeddings is missing"]),
    (config(head_dim="6"), ["head_dim is '6'; it must be int"]),
    (config(vocab_size=True), ["vocab_size is True; it must be int"]),
    (config(num_hidden_layers=0), ["num_hidden_layers is 0; it must be at least 1"]),
    (config(rms_norm_eps="1e-6"), ["rms_norm_eps is '1e-6'; it must be float or int"]),
    (config(num_key_value_heads=3), ["num_key_value_heads is 3", "num_attention_heads 4"]),
    (config(attention_bias=True), ["attention_bias is true"]),
    (config(hidden_act="gelu"), ["hidden_act is 'gelu'", "silu"]),
    (config(use_sliding_window=True), ["use_sliding_window is true"]),
    (config(layer_types=["full_attention", "sliding_attention"]), ["layer_types has 'sliding_attention'"]),
    (config(quantization_config={"quant_method": "fp8"}), ["quantization_config is not FP8 with a weight"]),
    (
        config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
        ["rope_parameters has rope_type 'yarn'"],
    ),
    (config(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_scaling has rope_type 'linear'"]),
    (config(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5}), ["partial_rotary_factor"]),
    (config(rope_parameters="default"), ["rope_parameters is 'default'; it must be an object"]),
    (config(rope_parameters=...), ["rope_theta is missing"]),
    (config(rope_theta=5e5), ["rope_theta is 500000.0, but rope_parameters says 10000.0"]),
    (config(rope_parameters=..., rope_theta=-1), ["rope_theta is -1; it must be a positive number"]),
    (config(dtype="int8"), ["dtype is 'int8'; supported: float32"]),
    (config(dtype=...), ["dtype is missing"]),
]


@pytest.mark.parametrize(("damage", "message"), CONFIGS, ids=[message[0] for _, message in CONFIGS])
def test_config_is_refused(folder: Path, damage: Damage, message: list[str]) -> None:
    damage(folder)
    refused(lambda: read_architecture(folder), str(folder / "config.json"), *message)


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


def test_every_supported_architecture_has_a_table() -> None:
    assert set(SUPPORTED) == table.TABLES.keys()


def shard(folder: Path) -> dict[str, str]:
    """Rewrite the checkpoint as two files and an index; returns the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for file, names in (("a.safetensors", sorted(tensors)[::2]), ("b.safetensors", sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Damage:
    return lambda folder: change(folder, shard(folder))


def add_to_b(folder: Path, name: str) -> None:
    tensors = load_file(folder / "b.safetensors")
    save_file(tensors | {name: torch.zeros(2)}, folder / "b.safetensors")


FILES: list[tuple[str, Damage, list[str]]] = [
    ("no weights", lambda f: (f / ONE).unlink(), ["/hf has neither model.safetensors"]),
    ("truncated data", cut(-100), [f"{ONE} is truncated"]),
    ("truncated header", cut(50), [f"{ONE} is truncated"]),
    ("empty file", cut(0), [f"{ONE} is truncated, or not a safetensors file"]),
    ("garbage header", lambda f: (f / ONE).write_bytes(b"\x40" + b"\0" * 7 + b"\xff{garbage}\n" * 50),
     [f"{ONE} is truncated, or not a safetensors file"]),
    ("header longer than memory", lambda f: (f / ONE).write_bytes(b"\xff" * 8 + (f / ONE).read_bytes()[8:]),
     [f"{ONE} is truncated, or not a safetensors file"]),
    ("a pickle", lambda f: torch.save({"w": 1}, f / ONE), [f"{ONE} is truncated, or not a safetensors file"]),
    ("missing tensor", edit_tensor(Q, lambda t: None), [f"has no tensor {Q};"]),
    ("missing head", edit_tensor("lm_head.weight", lambda t: None), ["has no tensor lm_head.weight;"]),
    ("extra tensor", edit_tensor("score.weight", lambda t: t), [f"{ONE} has score.weight"]),
    ("extra layer", edit_tensor(Q.replace(".1.", ".2."), lambda t: t), [f"{ONE} has model.layers.2.self"]),
    ("fewer layers in the config", config(num_hidden_layers=1), [f"{ONE} has model.layers.1."]),
    ("transposed", edit_tensor(Q, lambda t: t.T.contiguous()),
     [f"{ONE}: {Q} has shape (20, 24); config.json makes it (24, 20)"]),
    ("another vocabulary", config(vocab_size=1236),
     [f"{ONE}: lm_head.weight has shape (1237, 20); config.json makes it (1236, 20)"]),
    ("a bias", edit_tensor(Q.replace("weight", "bias"), lambda t: t),
     [f"{ONE} has model.layers.1.self_attn.q_proj.bias"]),
    ("NaN", edit_tensor(Q, put(torch.nan)), [f"{ONE}: {Q} is not finite in float32"]),
    ("infinity in a norm", edit_tensor(NORM, put(torch.inf)), [f"{ONE}: {NORM} is not finite in float32"]),
    ("integers", edit_tensor(Q, lambda t: t.to(torch.int8)), [f"{Q} in", f"{ONE} is I8; supported: F64"]),
    ("FP8", edit_tensor(Q, lambda t: t.to(torch.float8_e4m3fn)),
     ["/hf has FP8 weights, but its config.json no quant"]),
    ("stale single file", sharded(lambda f, m: shutil.copy(f / "a.safetensors", f / ONE)),
     [f"has both {ONE} and {INDEX}"]),
    ("missing shard", sharded(lambda f, m: (f / "b.safetensors").unlink()),
     ["b.safetensors not found", INDEX]),
    ("damaged shard", sharded(lambda f, m: (f / "b.safetensors").write_bytes(b"0" * 99)),
     ["b.safetensors is truncated"]),
    ("index names a lost tensor", sharded(lambda f, m: write_index(f, m | {"x": "a.safetensors"})),
     [INDEX, "a.safetensors does not hold x"]),
    ("index moves a tensor", sharded(lambda f, m: write_index(f, m | {min(m): "b.safetensors"})),
     [INDEX, "b.safetensors does not hold lm_head.weight"]),
    ("index forgets a tensor", sharded(lambda f, m: write_index(f, {n: m[n] for n in m if n != Q})),
     [INDEX, f"does not list {Q}"]),
    ("tensor in two files", sharded(lambda f, m: add_to_b(f, min(m))),
     ["lm_head.weight is in both", "a.safetensors and", "b.safetensors"]),
    ("index out of the folder", sharded(lambda f, m: write_index(f, m | {"x": "../a.safetensors"})),
     [INDEX, "'../a.safetensors' is not the name of a file beside it"]),
    ("index of numbers", sharded(lambda f, m: write_index(f, m | {"x": 3})), [INDEX, "3 is not the name"]),
    ("empty index", sharded(lambda f, m: write_index(f, {})), [INDEX, "weight_map must be an object"]),
    ("index without a map", sharded(lambda f, m: (f / INDEX).write_text("{}")), [INDEX, "is not an index"]),
    ("index that is no JSON", sharded(lambda f, m: (f / INDEX).write_text("{")), [INDEX, "is not an index"]),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_files_are_refused(folder: Path, damage: Damage, message: list[str]) -> None:
    damage(folder)
    refused(lambda: load(folder), str(folder), *message)
    out = folder.with_name("out")
    refused_without_a_trace(lambda: to_megatron(folder, out), folder.parent, str(folder), *message)


def test_sharded_files_load_like_one(folder: Path) -> None:
    single = load(folder)
    shard(folder)
    assert_bits(load(folder), single)


def test_values_too_large_for_the_model_are_refused(folder: Path) -> None:
    edit_tensor(Q, put(1e5))(folder)
    load(folder, dtype=torch.bfloat16)
    refused(lambda: load(folder, dtype=torch.float16), ONE, f"{Q} is not finite in float16")


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = save_model(tmp_path, tied=True)
    repeated = original["model.embed_tokens.weight"].clone()
    save_file(original | {"lm_head.weight": repeated}, tmp_path / ONE)
    with caplog.at_level(logging.INFO, "megatron_fspo"):
        parameters = load(tmp_path, tied=True)
    assert "lm_head.weight repeats the tied model.embed_tokens.weight" in caplog.text
    assert_bits(dict(export(tmp_path, [parameters])), original)

    repeated[1236, 19] += 1e-3
    save_file(original | {"lm_head.weight": repeated}, tmp_path / ONE)
    refused(lambda: load(tmp_path, tied=True), ONE, "lm_head.weight differs from model.embed_tokens.weight")
    save_file(original | {"lm_head.weight": repeated[:9]}, tmp_path / ONE)
    refused(lambda: load(tmp_path, tied=True), ONE, "lm_head.weight has shape (9, 20)")


@pytest.mark.parametrize(
    ("sizes", "tp", "padded", "message"),
    [
        ((4, 4, 24), 0, None, "tensor-parallel size 0 must be at least 1"),
        ((4, 2, 24), 4, None, "tensor-parallel size 4 does not divide num_key_value_heads 2"),
        ((6, 6, 24), 4, None, "tensor-parallel size 4 does not divide num_attention_heads 6"),
        ((4, 4, 22), 4, None, "tensor-parallel size 4 does not divide intermediate_size 22"),
        ((4, 4, 24), 4, 1236, "padded vocabulary 1236 must be at least vocab_size 1237"),
        ((4, 4, 24), 4, 1238, "multiple of the tensor-parallel size 4"),
    ],
)
def test_indivisible_layouts_are_refused(sizes: tuple, tp: int, padded: int | None, message: str) -> None:
    heads, kv_heads, ffn = sizes
    arch = Architecture(
        model_type="qwen3", num_layers=2, hidden_size=20, num_heads=heads, num_kv_heads=kv_heads, head_dim=6,
        ffn_size=ffn, vocab_size=1237, tied=False, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=128, dtype=torch.float32,
    )  # fmt: skip
    check_tensor_parallel(arch, 2, 1238)
    refused(lambda: check_tensor_parallel(arch, tp, padded), message)
