"""Manifests, and what tells two checkpoints apart."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from weights_helpers import edit_tensor, recast, refused, save_model, tensors_of, to_hf, to_megatron

from megatron_fspo.weights import (
    Difference,
    HFReader,
    Manifest,
    TensorRecord,
    compare,
    compare_with_manifest,
    open_checkpoint,
    read_architecture,
    read_manifest,
)

NORM = "model.norm.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    records = {
        f"tensor in {dtype}": TensorRecord((3, 4), dtype, sha256(b"").hexdigest())
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }
    save_model(tmp_path, "qwen3")
    arch = read_architecture(tmp_path)
    manifest = Manifest.new("huggingface", Path("somewhere/ü"), arch, {"tensor": 2}, records)
    assert manifest.versions.keys() == {"megatron-fspo", "megatron-core", "torch", "safetensors"}
    assert manifest.architecture == "qwen3"
    manifest.save(tmp_path)
    assert read_manifest(tmp_path) == manifest
    (tmp_path / "manifest.json").unlink()
    assert read_manifest(tmp_path) is None


def test_both_formats_hash_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fspo.weights.reader.BLOCK_BYTES", 2000)
    save_model(tmp_path / "hf", "qwen3_moe")
    original = recast(tmp_path / "hf", lambda n: torch.float32 if "norm" in n else torch.bfloat16)
    megatron = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert megatron.tensors == {
        name: TensorRecord(
            tuple(t.shape), t.dtype, sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        )
        for name, t in original.items()
    }
    assert (megatron.format, megatron.source) == ("torch_dist", str(tmp_path / "hf"))
    back = to_hf(tmp_path / "megatron", tmp_path / "back", layout={"tensor": 2})
    assert back.tensors == megatron.tensors
    assert (back.format, back.layout) == ("huggingface", {"tensor": 2})
    assert read_manifest(tmp_path / "back") == back
    arch = read_architecture(tmp_path / "hf")
    for folder in (tmp_path / "megatron", tmp_path / "back"):
        manifest = read_manifest(folder)
        assert manifest is not None
        assert list(compare_with_manifest(open_checkpoint(folder, arch), dict(manifest.tensors))) == []


RECORD = {"shape": [20], "dtype": "float32", "sha256": "0" * 64}
MANIFEST = {
    "format": "huggingface", "source": "x", "architecture": "qwen3", "versions": {}, "layout": {},
    "tensors": {NORM: RECORD},
}  # fmt: skip
DAMAGED = [
    b"", b"[]", b"{", b"\xff\xff", b"null",
    *(MANIFEST | {"more": 1}, MANIFEST | {"tensors": [1]}, MANIFEST | {"tensors": {NORM: 3}}),
    {key: value for key, value in MANIFEST.items() if key != "format"},
    *(
        MANIFEST | {"tensors": {NORM: record}}
        for record in (
            {"shape": [20], "dtype": "float32"}, RECORD | {"shape": 20}, RECORD | {"dtype": "Tensor"},
            RECORD | {"dtype": []}, RECORD | {"dtype": "int8"},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=str)
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(MANIFEST))
    assert read_manifest(tmp_path) is not None
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    refused(lambda: read_manifest(tmp_path), tmp_path, f"{path} is not a manifest")


def first_value(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_put((torch.tensor(0),), torch.tensor(value))


def bits(pattern: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", pattern))
    return value


def one_bit(tensor: Tensor) -> Tensor:
    tensor.view(torch.int32)[-1, -1] ^= 1
    return tensor


CHANGES: dict[str, tuple[str, Callable[[Tensor], Tensor], int]] = {
    "one bit": (Q, one_bit, 1),
    "all values": (Q, lambda t: t + 1, 480),
    "another row": (Q, first_value(0.5), 20),
    "the sign of zero": (NORM, first_value(0.0), 1),
    "NaN": (NORM, first_value(math.nan), 1),
    "infinity": (NORM, first_value(math.inf), 1),
}


def differences(sound: Path, other: Path) -> list[Difference]:
    """Of the Megatron checkpoint and ``other``; the manifest must see the same tensors."""
    arch, manifest = read_architecture(sound / "hf"), read_manifest(sound / "megatron")
    assert manifest is not None
    found = list(compare(open_checkpoint(sound / "megatron", arch), HFReader(other), arch))
    against = list(compare_with_manifest(HFReader(other), dict(manifest.tensors)))
    assert {one.name for one in found} == {one.name for one in against}
    return found


def changed(sound: Path, folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    tensors = tensors_of(sound / "hf")
    folder.mkdir()
    (folder / "config.json").write_bytes((sound / "hf" / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    edit_tensor(name, change)(folder)
    return folder


@pytest.mark.parametrize("block_bytes", [2**28, 200])
@pytest.mark.parametrize(("name", "change", "values"), CHANGES.values(), ids=CHANGES)
def test_every_bit_counts(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, change: Callable[[Tensor], Tensor], values: int, block_bytes: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("megatron_fspo.weights.reader.BLOCK_BYTES", block_bytes)
    assert differences(sound, sound / "hf") == []
    other = changed(sound, tmp_path / "other", name, change)
    before, after = (tensors_of(folder)[name].double() for folder in (sound / "hf", other))
    largest = (before - after).abs().max().item()
    expected = Difference(name, "values", values, math.inf if math.isnan(largest) else largest)
    assert differences(sound, other) == [expected]


def test_a_nan_is_not_another_nan(sound: Path, tmp_path: Path) -> None:
    folders = [
        changed(sound, tmp_path / f"{pattern:x}", NORM, first_value(bits(pattern)))
        for pattern in (0x7FC00000, 0x7FC00000 + 1)
    ]
    arch = read_architecture(sound / "hf")
    first, second = (HFReader(folder) for folder in folders)
    assert list(compare(first, first, arch)) == []
    assert list(compare(first, second, arch)) == [Difference(NORM, "values", 1, math.inf)]


def test_other_kinds_are_told(sound: Path, tmp_path: Path) -> None:
    half = changed(sound, tmp_path / "half", NORM, lambda t: t.half())
    assert differences(sound, half) == [Difference(NORM, "torch.float32 (20,) and torch.float16 (20,)")]
    short = changed(sound, tmp_path / "short", NORM, lambda t: t[1:].clone())
    assert differences(sound, short) == [Difference(NORM, "torch.float32 (20,) and torch.float32 (19,)")]
    gone = changed(sound, tmp_path / "gone", NORM, lambda t: None)
    assert differences(sound, gone) == [Difference(NORM, f"not in {gone}")]


def test_a_flipped_bit_beside_a_manifest_is_refused(sound: Path, tmp_path: Path) -> None:
    to_hf(sound / "megatron", tmp_path / "export")
    to_megatron(tmp_path / "export", tmp_path / "sound")
    edit_tensor(Q, one_bit)(tmp_path / "export")
    refused(lambda: to_megatron(tmp_path / "export", tmp_path / "out"), tmp_path, Q, "manifest.json")


def test_the_manifest_sees_a_tensor_too_many(sound: Path, tmp_path: Path) -> None:
    more = changed(sound, tmp_path / "more", "score.weight", lambda t: t)
    manifest = read_manifest(sound / "megatron")
    assert manifest is not None
    found = list(compare_with_manifest(HFReader(more), dict(manifest.tensors)))
    assert found == [Difference("score.weight", "not in the manifest")]
