"""Megatron → Hugging Face from damaged or hostile input: named in one line, not run, nothing left behind."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from weights_helpers import Damage, assert_bits, cut, refused, tensors_of, to_hf

from megatron_fspo.errors import InputError
from megatron_fspo.weights import MegatronReader, read_architecture

DATA, FIRST = Path("torch_dist"), Path("torch_dist", "__0_0.distcp")
NORM = "decoder.final_layernorm.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"


class Payload:
    """Unpickling it would leave a file."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self._made = call, args

    def __reduce__(self) -> Any:
        return self._made


def touch(path: str) -> None:
    Path(path).touch()


KINDS: dict[str, Callable[[Path], Payload]] = {
    "os.system": lambda trace: Payload(os.system, f"touch {trace}"),
    "eval": lambda trace: Payload(eval, f"__import__('pathlib').Path({str(trace)!r}).touch()"),
    "a class of ours": lambda trace: Payload(touch, str(trace)),
}


def edit(change: Callable[[Metadata], object]) -> Damage:
    """Of the index."""

    def damage(folder: Path) -> None:
        path = folder / DATA / ".metadata"
        index = pickle.loads(path.read_bytes())
        change(index)
        path.write_bytes(pickle.dumps(index))

    return damage


def replace_entry(folder: Path, key: str, value: object) -> None:
    """The first entry of a key becomes another, in a file of its own."""

    def change(index: Metadata) -> None:
        where = next(where for where in index.storage_data if where.fqn == key)
        torch.save(value, folder / DATA / "new.distcp")
        size = (folder / DATA / "new.distcp").stat().st_size
        index.storage_data[where] = replace(
            index.storage_data[where], relative_path="new.distcp", offset=0, length=size
        )

    edit(change)(folder)


def another_entry(value: object) -> Damage:
    return lambda folder: replace_entry(folder, NORM, value)


def hostile_metadata(folder: Path, value: object) -> Path:
    path = folder / DATA / ".metadata"
    path.write_bytes(pickle.dumps(value))
    return path


def hostile_metadata_inside(folder: Path, value: object) -> Path:
    edit(lambda index: setattr(index, "planner_data", value))(folder)
    return folder / DATA / ".metadata"


def hostile_entry(folder: Path, value: object) -> Path:
    replace_entry(folder, NORM, value)
    return folder / DATA / "new.distcp"


@pytest.mark.parametrize("payload", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("put", [hostile_metadata, hostile_metadata_inside, hostile_entry])
def test_a_hostile_pickle_does_not_run(
    sound: Path, tmp_path: Path, payload: Callable[[Path], Payload], put: Callable[[Path, object], Path]
) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "megatron"
    shutil.copytree(sound / "megatron", folder)
    path = put(folder, payload(trace))
    reason = f"{path} is damaged or unsafe"
    refused(lambda: to_hf(folder, tmp_path / "out"), tmp_path, reason)
    assert not trace.exists()
    # What a trusting reader does would have run it.
    pickle.loads(path.read_bytes()) if path.name == ".metadata" else torch.load(path, weights_only=False)
    assert trace.exists()


def flip(folder: Path) -> None:
    """One bit of a value of the final norm, in the middle of its entry."""
    index = pickle.loads((folder / DATA / ".metadata").read_bytes())
    info = next(info for where, info in index.storage_data.items() if where.fqn == NORM)
    path = folder / DATA / info.relative_path
    data = bytearray(path.read_bytes())
    entry = io.BytesIO(data[info.offset : info.offset + info.length])
    value = torch.load(entry, weights_only=True)
    at = data.index(value.numpy().tobytes(), info.offset)
    data[at + 4] ^= 1
    path.write_bytes(data)


def placed(**changes: object) -> Damage:
    """Other words on the place of every entry."""

    def change(index: Metadata) -> None:
        for where, info in index.storage_data.items():
            index.storage_data[where] = replace(info, **changes)

    return edit(change)


def resized(key: str, *size: int) -> Damage:
    def change(index: Metadata) -> None:
        index.state_dict_metadata[key] = replace(index.state_dict_metadata[key], size=torch.Size(size))

    return edit(change)


def odd_chunk(index: Metadata) -> None:
    index.state_dict_metadata[NORM].chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 20]))
    index.storage_data[MetadataIndex(NORM, torch.Size([0, 0]))] = index.storage_data.pop(
        MetadataIndex(NORM, torch.Size([0]))
    )


DAMAGE: dict[str, tuple[Damage, list[str]]] = {
    "truncated .distcp": (cut(-1000, FIRST), [f"{FIRST} is truncated"]),
    "missing .distcp": (lambda f: (f / FIRST).unlink(), [f"{FIRST} is missing; it contains"]),
    "garbage in the .distcp": (
        lambda f: (f / FIRST).write_bytes(b"x" * (f / FIRST).stat().st_size),
        [f"{FIRST} is damaged"],
    ),
    "flipped bit": (flip, ["model.norm.weight differs from manifest.json"]),
    "missing .metadata": (lambda f: (f / DATA / ".metadata").unlink(), [".metadata is missing"]),
    "truncated .metadata": (cut(999, DATA / ".metadata"), [".metadata is damaged"]),
    "a .metadata of something else": (
        lambda f: (f / DATA / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        [".metadata is not the index"],
    ),
    "a .metadata with other places": (
        edit(lambda i: i.storage_data.update(dict.fromkeys(i.storage_data, "__0_0.distcp"))),
        [".metadata is not the index"],
    ),
    "path out of the folder": (placed(relative_path="../config.json"), [".metadata: '../config.json'"]),
    "missing key": (edit(lambda i: i.state_dict_metadata.pop(NORM)), [f".metadata has no {NORM}"]),
    "wrong global shape": (resized(NORM, 21), [f".metadata: {NORM} is (21,)", "(20,)"]),
    "vocabulary too small": (
        resized("output_layer.weight", 1236, 20),
        ["output_layer.weight is (1236, 20)", "(1237, 20)"],
    ),
    "hole": (
        edit(lambda i: i.state_dict_metadata[FC1].chunks.pop(1)),
        [f".metadata: chunks cover 0 of 480 values of {FC1} at (0, 24, 0)"],
    ),
    "chunk of other dimensions": (edit(odd_chunk), [f".metadata: {NORM} of shape (20,)", "(1, 20) at"]),
    "chunk in no file": (
        edit(lambda i: i.storage_data.pop(MetadataIndex(NORM, torch.Size([0])))),
        [f".metadata: no file is listed for {NORM}"],
    ),
    "compressed": (placed(transform_descriptors=["zstd"]), [f"{FIRST}", "is compressed"]),
    "entry of another shape": (another_entry(torch.zeros(21)), [f"new.distcp: {NORM}"]),
    "entry of another dtype": (another_entry(torch.zeros(20).half()), [f"new.distcp: {NORM}"]),
    "entry that is no tensor": (another_entry([1.0] * 20), [f"new.distcp: {NORM}"]),
    "NaN": (another_entry(torch.full([20], torch.nan)), ["model.norm.weight is not finite in float32"]),
    "damaged manifest": (cut(999, "manifest.json"), ["manifest.json is not a manifest"]),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_leaves_no_trace(
    sound: Path, tmp_path: Path, damage: Damage, message: list[str]
) -> None:
    folder = tmp_path / "megatron"
    shutil.copytree(sound / "megatron", folder)
    damage(folder)
    refused(lambda: to_hf(folder, tmp_path / "out"), tmp_path, *message)


def test_no_damaged_byte_of_the_index_makes_wrong_values(sound: Path, tmp_path: Path) -> None:
    """Whatever the byte was: refused in one line, or it did not matter."""
    folder = tmp_path / "megatron"
    shutil.copytree(sound / "megatron", folder)
    arch, path = read_architecture(folder), folder / DATA / ".metadata"
    whole, dice, refused = path.read_bytes(), random.Random(0), 0
    original = tensors_of(sound / "hf")
    for _ in range(60):
        data = bytearray(whole)
        data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
        try:
            reader = MegatronReader(folder, arch)
            found = {name: reader.read(name) for name in original}
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert_bits(found, original)
    assert refused > 30
