"""Distributed checkpoints of any layout read as the Hugging Face tensors they hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from distcp_helpers import Chunks, model_chunks, put_together, save_distcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from weights_helpers import FAMILIES, assert_bits, assert_slices, save_model

from megatron_fspo.errors import InputError
from megatron_fspo.weights import (
    Architecture,
    HFReader,
    MegatronReader,
    compare,
    expected_hf_shapes,
    read_architecture,
)

OTHERS = {
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": ((4,), [((0,), torch.ones(4))]),
    "chained_0.optimizer.state.fp32_param.output_layer.weight": ((4,), [((0,), torch.ones(4))]),
}
OBJECTS = {
    "rng_state/shard_0_1": [{"random_rng_state": 3}],
    "optimizer.state.common": {"step": 1},
    "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": [None],
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("how", ["stacked", "numbered", "spans"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_that_saved_does_not_matter(tmp_path: Path, family: str, how: str, tp: int) -> None:
    original = save_model(tmp_path / "hf", family, tied=family == "qwen3", heads=8, kv_heads=2)
    arch = read_architecture(tmp_path / "hf")
    tensors = model_chunks(original, how, tp, heads=8, groups=2)
    if how != "spans":
        assert len(tensors["embedding.word_embeddings.weight"][1]) == tp
    save_distcp(tmp_path / "saved", tensors | OTHERS, OBJECTS, files=3)
    reader = MegatronReader(tmp_path / "saved", arch)
    assert reader.names() == original.keys()
    assert_bits({name: reader.read(name) for name in original}, original)
    assert {name: reader.shape(name) for name in original} == expected_hf_shapes(arch)
    assert {reader.dtype(name) for name in original} == {torch.float32}
    assert {reader.file(name).parent for name in original} == {tmp_path / "saved"}
    assert_slices(reader, original, seed=tp)
    assert list(compare(HFReader(tmp_path / "hf"), reader, arch)) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_torch_saves_reads_too(tmp_path: Path) -> None:
    """torch's own planner and writer: whole tensors, so one chunk for all layers."""
    from torch.distributed import checkpoint

    original = save_model(tmp_path / "hf", "qwen3")
    whole = model_chunks(original, "spans", 1, heads=4, groups=2)
    state = {key: chunks[0][1] for key, (_, chunks) in whole.items()}
    checkpoint.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    reader = MegatronReader(tmp_path / "saved", read_architecture(tmp_path / "hf"))
    assert_bits({name: reader.read(name) for name in original}, original)


def test_parameters_the_model_has_not_are_foreign(tmp_path: Path) -> None:
    original = save_model(tmp_path / "hf", "qwen3")
    arch = read_architecture(tmp_path / "hf")
    tensors = model_chunks(original, "stacked", 1, heads=4, groups=2)
    # Not of the optimizer, though its name begins so.
    for key in ("optimizers.weight", "decoder.layers.mlp.linear_fc1.bias"):
        save_distcp(tmp_path / "saved", tensors | {key: ((4,), [((0,), torch.ones(4))])}, {})
        with pytest.raises(InputError, match=rf"/saved/\.metadata has {key}"):
            MegatronReader(tmp_path / "saved", arch)


SMALL = Architecture(
    model_type="qwen3", num_layers=2, hidden_size=5, num_heads=4, num_kv_heads=2, head_dim=3,
    ffn_size=6, vocab_size=11, tied=False, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
    dtype=torch.float32,
)  # fmt: skip
SMALL_HF = {name: torch.randn(shape) for name, shape in expected_hf_shapes(SMALL).items()}


def cut(values: Tensor, draw) -> Chunks:
    """Any number of straight cuts, each through one piece."""
    pieces: Chunks = [((0,) * values.dim(), values)]
    for _ in range(draw(st.integers(0, 6))):
        at, piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, piece.dim() - 1))
        size = draw(st.integers(0, piece.shape[dim]))
        if 0 < size < piece.shape[dim]:
            first, second = piece.split([size, piece.shape[dim] - size], dim)
            after = tuple(o + size * (d == dim) for d, o in enumerate(at))
            pieces += [(at, first), (after, second)]
        else:
            pieces.append((at, piece))
    return draw(st.permutations(pieces))


@st.composite
def checkpoints(draw) -> dict[str, tuple[tuple[int, ...], Chunks]]:
    how = draw(st.sampled_from(["numbered", "spans"]))
    whole = model_chunks(SMALL_HF, how, 1, heads=4, groups=2)
    return {key: (shape, cut(put_together(chunks), draw)) for key, (shape, chunks) in whole.items()}


@given(checkpoints(), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_any_cut_reads_back(tensors: dict[str, tuple[tuple[int, ...], Chunks]], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_distcp(Path(folder), tensors, {}, files=1 + seed % 3)
        reader = MegatronReader(folder, SMALL)
        assert_bits({name: reader.read(name) for name in SMALL_HF}, SMALL_HF)
        assert_slices(reader, SMALL_HF, seed)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_hole_is_never_read_as_values(data: st.DataObject) -> None:
    """Not even where another chunk is there twice, so that the number of values is right."""
    tensors = data.draw(checkpoints())
    key = data.draw(
        st.sampled_from(sorted(k for k, (_, chunks) in tensors.items() if len(chunks) > 1) or [""])
    )
    if not key:
        return
    shape, chunks = tensors[key]
    lost = data.draw(st.integers(0, len(chunks) - 1))
    at, values = chunks[lost]
    if key.endswith("word_embeddings.weight") or key == "output_layer.weight":
        if at[0] >= SMALL.vocab_size:  # padding may be lost
            return
    rest = chunks[:lost] + chunks[lost + 1 :]
    elsewhere = moved_inside(rest[0], values.shape, shape)
    if elsewhere[0] != at and data.draw(st.booleans()):
        rest.append(elsewhere)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(InputError, match=rf"{key}"):
        save_distcp(Path(folder), tensors | {key: (shape, rest)}, {})
        reader = MegatronReader(folder, SMALL)
        for name in SMALL_HF:
            reader.read(name)


def moved_inside(
    onto: tuple[tuple[int, ...], Tensor], like: torch.Size, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], Tensor]:
    """A chunk of a size that begins where another does, or as near as the tensor allows."""
    at = tuple(min(o, whole - size) for o, size, whole in zip(onto[0], like, shape, strict=True))
    return at, torch.zeros(like)
