"""Hugging Face → Megatron from damaged input: each is named in one line, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conversion_helpers import (
    contents,
    refused_without_a_trace,
    save_model,
    tensors_of,
    to_hf,
    to_megatron,
)
from damage_helpers import INDEX, ONE, Damage, config, cut, edit_tensor, put
from safetensors.torch import load_file, save_file

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.0.self_attn.k_norm.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_model(folder / "one", "qwen3")
    save_model(folder / "shards", "qwen3", shard_size="100KB")
    save_model(folder / "experts", "qwen3_moe")
    return folder


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def repeat_in_first(folder: Path) -> None:
    """A tensor of the last shard, in the first too; the index stays right."""
    first, last = first_shard(folder), max(folder.glob("model-*.safetensors"))
    name = min(load_file(last))
    save_file(load_file(first) | {name: torch.zeros(3)}, first)


def edit_index(change: Callable[[dict[str, str]], object]) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def only_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / ONE), folder / "pytorch_model.bin")
    (folder / ONE).unlink()


def flip(folder: Path) -> None:
    """One bit of the last value."""
    data = bytearray((folder / ONE).read_bytes())
    data[-4] ^= 1
    (folder / ONE).write_bytes(data)


def flip_beside_a_manifest(folder: Path) -> None:
    """The folder becomes an export of ours, then suffers."""
    to_megatron(folder, folder / "megatron")
    to_hf(folder / "megatron", folder / "export")
    for path in (folder / "export").iterdir():
        path.replace(folder / path.name)
    shutil.rmtree(folder / "export")
    shutil.rmtree(folder / "megatron")
    to_megatron(folder, folder / "megatron")  # sound so far
    shutil.rmtree(folder / "megatron")
    flip(folder)


def damaged_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"tensors": ')


DAMAGE: dict[str, tuple[str, Damage, list[str]]] = {
    "missing tensor": ("one", edit_tensor(Q, lambda t: None), ["/one has no tensor", Q]),
    "missing expert": (
        "experts",
        edit_tensor("model.layers.0.mlp.experts.2.up_proj.weight", lambda t: None),
        ["/experts has no tensor model.layers.0.mlp.experts.2.up_proj.weight"],
    ),
    "unexpected tensor": ("one", edit_tensor("score.weight", lambda t: t), [ONE, "score.weight"]),
    "unexpected bias": (
        "one",
        edit_tensor(Q.replace("weight", "bias"), lambda t: t),
        [ONE, Q.replace("weight", "bias")],
    ),
    "tensor in two shards": ("shards", repeat_in_first, ["is in both", "model-00001-of", "and"]),
    "wrong shape": ("one", edit_tensor(Q, lambda t: t[:-1].clone()), [ONE, Q, "(23, 20)", "(24, 20)"]),
    "transposed": ("one", edit_tensor(Q, lambda t: t.T.contiguous()), [ONE, Q, "(20, 24)", "(24, 20)"]),
    "whole numbers": ("one", edit_tensor(Q, lambda t: t.int()), [ONE, Q, "I32"]),
    "NaN": ("one", edit_tensor(Q, put(torch.nan)), [ONE, Q, "not finite"]),
    "infinity": ("one", edit_tensor(NORM, put(-torch.inf)), [ONE, NORM, "not finite"]),
    "infinity in half precision": (
        "one",
        edit_tensor(NORM, lambda t: (t * 1e9).half()),
        [ONE, NORM, "not finite in float16"],
    ),
    "config with a layer less": ("one", config(num_hidden_layers=1), [ONE, "has model.layers.1."]),
    "config with a layer more": ("one", config(num_hidden_layers=3), ["has no tensor model.layers.2."]),
    "config with another vocabulary": (
        "one",
        config(vocab_size=1236),
        [ONE, "lm_head.weight has shape (1237, 20)", "(1236, 20)"],
    ),
    "config that ties what differs": (
        "one",
        config(tie_word_embeddings=True),
        [ONE, "lm_head.weight differs from model.embed_tokens.weight"],
    ),
    "config that unties what is one": (
        "one",
        edit_tensor("lm_head.weight", lambda t: None),
        ["/one has no tensor lm_head.weight"],
    ),
    "config with an expert less": (
        "experts",
        config(num_experts=2, num_local_experts=2),
        ["model.layers.0.mlp.experts.2."],
    ),
    "config of another family": ("one", config(model_type="llama"), [ONE, "a llama model"]),
    "unknown architecture": ("one", config(model_type="gpt2"), ["config.json: model_type is 'gpt2'"]),
    "no config": ("one", lambda f: (f / "config.json").unlink(), ["config.json not found"]),
    "truncated safetensors": ("one", cut(-10), [f"{ONE} is truncated"]),
    "truncated header": ("one", cut(99), [f"{ONE} is truncated"]),
    "empty file": ("one", cut(0), [f"{ONE} is truncated"]),
    "garbage header": (
        "one",
        lambda f: (f / ONE).write_bytes(b"\x40" + b"\0" * 7 + b"\xff{garbage}\n" * 50),
        [f"{ONE} is truncated, or not a safetensors file"],
    ),
    "header longer than memory": (
        "one",
        lambda f: (f / ONE).write_bytes(b"\xff" * 8 + (f / ONE).read_bytes()[8:]),
        [f"{ONE} is truncated, or not a safetensors file"],
    ),
    "missing shard": ("shards", lambda f: first_shard(f).unlink(), ["model-00001-of", "not found"]),
    "damaged shard": ("shards", lambda f: first_shard(f).write_bytes(b"0" * 99), ["model-00001-of"]),
    "index that names a file outside": (
        "shards",
        edit_index(lambda m: m.update({Q: "../one/model.safetensors"})),
        [INDEX, "'../one/model.safetensors' is not the name of a file beside it"],
    ),
    "index that moves a tensor": (
        "shards",
        edit_index(lambda m: m.update({min(m): m[max(m)]})),
        [INDEX, "does not hold lm_head.weight"],
    ),
    "index that forgets a tensor": ("shards", edit_index(lambda m: m.pop(Q)), [INDEX, f"does not list {Q}"]),
    "only pytorch_model.bin": ("one", only_a_pickle, ["/one has neither model.safetensors nor"]),
    "flipped bit beside a manifest": ("one", flip_beside_a_manifest, ["is not what the manifest.json"]),
    "damaged manifest": ("one", damaged_manifest, ["manifest.json is not a manifest"]),
}


@pytest.mark.parametrize(("source", "damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_leaves_no_trace(
    sound: Path, tmp_path: Path, source: str, damage: Damage, message: list[str]
) -> None:
    shutil.copytree(sound / source, tmp_path / source)
    damage(tmp_path / source)
    refused_without_a_trace(lambda: to_megatron(tmp_path / source, tmp_path / "out"), tmp_path, *message)


def test_folders_made_for_the_output_go_with_it(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "one", tmp_path / "one")
    out = tmp_path / "new" / "newer" / "out"
    to_megatron(tmp_path / "one", out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    shutil.rmtree(tmp_path / "new" / "newer")  # new is the user's, though empty
    edit_tensor(Q, put(torch.nan))(tmp_path / "one")
    refused_without_a_trace(lambda: to_megatron(tmp_path / "one", out), tmp_path, ONE, Q, "not finite")


@pytest.mark.parametrize("damage", ["NaN", "flipped bit beside a manifest"])
def test_damage_leaves_the_checkpoint_it_would_have_replaced(
    sound: Path, tmp_path: Path, damage: str
) -> None:
    to_megatron(sound / "one", tmp_path / "out")
    shutil.copytree(sound / "one", tmp_path / "one")
    DAMAGE[damage][1](tmp_path / "one")
    refused_without_a_trace(
        lambda: to_megatron(tmp_path / "one", tmp_path / "out"), tmp_path, *DAMAGE[damage][2]
    )


def test_a_disk_without_room_is_seen_before_the_first_byte(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(tensor.nbytes for tensor in tensors_of(sound / "one").values())
    to_megatron(sound / "one", tmp_path / "megatron")
    before = contents(tmp_path)
    free = SimpleNamespace(free=size - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    needs = f"has {size - 1:,} bytes free; the checkpoint needs {size:,}"
    refused_without_a_trace(lambda: to_megatron(sound / "one", tmp_path / "out"), tmp_path, needs)
    refused_without_a_trace(lambda: to_hf(tmp_path / "megatron", tmp_path / "out"), tmp_path, needs)
    assert contents(tmp_path) == before
    free.free = size
    to_hf(tmp_path / "megatron", tmp_path / "out")
