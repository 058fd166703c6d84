"""Hugging Face → Megatron from damaged input: each is named in one line, and leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weights_helpers import (
    ONE,
    Damage,
    config,
    contents,
    edit_tensor,
    put,
    refused_without_a_trace,
    save_model,
    tensors_of,
    to_hf,
    to_megatron,
)

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.0.self_attn.k_norm.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_model(folder / "one", "qwen3")
    save_model(folder / "experts", "qwen3_moe")
    return folder


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


# Beside the files of test_weights_damage.py.
DAMAGE: dict[str, tuple[str, Damage, list[str]]] = {
    "missing expert": (
        "experts",
        edit_tensor("model.layers.0.mlp.experts.2.up_proj.weight", lambda t: None),
        ["/experts has no tensor model.layers.0.mlp.experts.2.up_proj.weight"],
    ),
    "config with an expert less": (
        "experts",
        config(num_experts=2, num_local_experts=2),
        ["model.layers.0.mlp.experts.2."],
    ),
    "NaN": ("one", edit_tensor(Q, put(torch.nan)), [ONE, Q, "not finite"]),
    "infinity in half precision": (
        "one",
        edit_tensor(NORM, lambda t: (t * 1e9).half()),
        [ONE, NORM, "not finite in float16"],
    ),
    "config that ties what differs": (
        "one",
        config(tie_word_embeddings=True),
        [ONE, "lm_head.weight differs from model.embed_tokens.weight"],
    ),
    "config of another family": ("one", config(model_type="llama"), [ONE, "a llama model"]),
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
