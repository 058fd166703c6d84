"""Hugging Face → Megatron → Hugging Face, through files: what comes back is what went in, bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from weights_helpers import FAMILIES, assert_bits, recast, save_model, tensors_of, to_hf, to_megatron

from megatron_fspo.weights import (
    HFReader,
    MegatronReader,
    compare,
    read_architecture,
    write_megatron_checkpoint,
)
from megatron_fspo.weights.safe_pickle import read_metadata

DTYPES = {
    "float32": lambda name: torch.float32,
    "bfloat16": lambda name: torch.bfloat16,
    "float16": lambda name: torch.float16,
    "norms in float32": lambda name: torch.float32 if "norm" in name else torch.bfloat16,
    # Nothing short of float32 holds both.
    "one layer in float16": lambda name: torch.float16 if ".layers.0." in name else torch.bfloat16,
}
SIDE_FILES = "config.json generation_config.json tokenizer.json tokenizer_config.json merges.txt".split()
# Every family, tied and not, in every dtype; what else can vary goes round.
CASES = list(itertools.product(FAMILIES, (False, True), DTYPES))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n])))
def test_a_checkpoint_comes_back_bit_by_bit(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, tied, dtypes = CASES[number]
    heads, kv_heads = ((4, 4), (4, 2), (8, 1))[number % 3]
    shard_size = ("5GB", "30KB")[number % 2]
    if number % 4 < 2:
        monkeypatch.setattr("megatron_fspo.weights.reader.BLOCK_BYTES", 1500)
    source, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    save_model(source, family, tied=tied, heads=heads, kv_heads=kv_heads, shard_size=shard_size)
    original = recast(source, DTYPES[dtypes])
    assert ("lm_head.weight" in original) is not tied
    assert (len(list(source.glob("*.safetensors"))) > 1) is (shard_size != "5GB")

    to_megatron(source, megatron)
    assert ("output_layer.weight" in read_metadata(megatron / "torch_dist").state_dict_metadata) is not tied
    to_hf(megatron, back, max_shard_bytes=40_000 if number % 5 else 2**30)
    assert_bits(tensors_of(back), original)
    for file in SIDE_FILES:
        for folder in (megatron, back):
            assert (folder / file).read_bytes() == (source / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_experts_may_be_counted_under_either_name(tmp_path: Path) -> None:
    """The hub's configs have num_experts; transformers 5 saves num_local_experts."""
    save_model(tmp_path, "qwen3_moe")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    count = {config.pop(key) for key in ("num_experts", "num_local_experts") if key in config}.pop()
    found = []
    for key in ("num_experts", "num_local_experts"):
        path.write_text(json.dumps(config | {key: count}))
        found.append(read_architecture(tmp_path))
    assert found[0] == found[1]
    assert found[0].num_experts == 3


def test_large_tensors_go_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = save_model(tmp_path / "hf", "qwen3")
    monkeypatch.setattr("megatron_fspo.weights.reader.BLOCK_BYTES", 4000)
    done: list[int] = []
    arch = read_architecture(tmp_path / "hf")
    write_megatron_checkpoint(tmp_path / "megatron", HFReader(tmp_path / "hf"), arch, progress=done.append)
    assert sum(done) == sum(tensor.nbytes for tensor in original.values())
    assert max(done) <= 4000
    chunks = read_metadata(tmp_path / "megatron" / "torch_dist").state_dict_metadata
    assert len(chunks["embedding.word_embeddings.weight"].chunks) == -(-1237 * 80 // 4000)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), original)


def test_an_own_megatron_checkpoint_converts_to_another(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "qwen3_moe")
    original = recast(tmp_path / "hf", DTYPES["one layer in float16"])
    first = to_megatron(tmp_path / "hf", tmp_path / "first")
    arch = read_architecture(tmp_path / "first")
    second = write_megatron_checkpoint(tmp_path / "second", MegatronReader(tmp_path / "first", arch), arch)
    assert second.tensors == first.tensors
    readers = HFReader(tmp_path / "hf"), MegatronReader(tmp_path / "second", arch)
    assert list(compare(*readers, arch)) == []
    assert readers[1].names() == original.keys()
    # Without the manifest nobody knows what each was: float32 holds all.
    (tmp_path / "second" / "manifest.json").unlink()
    bare = MegatronReader(tmp_path / "second", arch)
    q = "model.layers.1.self_attn.q_proj.weight"
    assert_bits({q: bare.read(q)}, {q: original[q].float()})
