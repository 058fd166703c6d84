"""gpt-oss's own files: experts in MXFP4, read as transformers reads them, and each rank's part of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from weights_helpers import (
    VOCAB,
    Damage,
    assert_bits,
    assert_slices,
    config,
    edit_config,
    edit_tensor,
    refused,
    save_model,
    tensors_of,
    to_hf,
    to_megatron,
)

from megatron_fspo.weights import (
    HFReader,
    MegatronReader,
    check_checkpoint,
    compare,
    iterate_hf_tensors,
    load_into,
    read_architecture,
    resolve,
    shard_shape,
    shard_slices,
    to_megatron_shard,
    write_hf_checkpoint,
)
from megatron_fspo.weights.table import whole_model

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
PLAIN = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def save_mxfp4(folder: Path) -> dict[str, Tensor]:
    """A checkpoint whose matrices of experts are random blocks and scales; returns what it means."""
    original = save_model(folder, "gpt_oss")
    generator = torch.Generator().manual_seed(0)
    stored, meant = {}, {}
    for name, tensor in original.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 150, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config=PLAIN, dtype=...)
    return meant


def test_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    meant = save_mxfp4(tmp_path / "mxfp4")
    reader, arch = HFReader(tmp_path / "mxfp4"), read_architecture(tmp_path / "mxfp4")
    check_checkpoint(reader, arch)
    assert {reader.dtype(name) for name in meant} == {torch.bfloat16}
    assert_bits({name: reader.read(name) for name in meant}, meant)
    assert_slices(reader, meant, seed=0, count=5)
    to_megatron(tmp_path / "mxfp4", tmp_path / "megatron")
    assert list(compare(reader, MegatronReader(tmp_path / "megatron", arch), arch)) == []
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), meant)


BLOCKS, SCALES = f"{GATE_UP}_blocks", f"{GATE_UP}_scales"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "no scales": (edit_tensor(SCALES, lambda t: None), f"{BLOCKS} has no {SCALES}"),
    "no blocks": (edit_tensor(BLOCKS, lambda t: None), f"has no tensor {GATE_UP}"),
    "fewer scales": (edit_tensor(SCALES, lambda t: t[:, 1:].clone()), f"{BLOCKS} has no {SCALES}"),
    "scales of floats": (edit_tensor(SCALES, lambda t: t.float()), f"{BLOCKS} has no {SCALES}"),
    "both": (edit_tensor(GATE_UP, lambda t: torch.zeros(3, 32, 64)), "or there twice"),
    "fewer experts": (config(num_local_experts=2), "has shape (3, 32"),
    "an infinite scale": (edit_tensor(SCALES, lambda t: t.fill_(255)), f"{GATE_UP} is not finite"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(tmp_path: Path, what: str) -> None:
    save_mxfp4(tmp_path / "mxfp4")
    damage, message = DAMAGE[what]
    damage(tmp_path / "mxfp4")
    refused(lambda: to_megatron(tmp_path / "mxfp4", tmp_path / "out"), tmp_path, message)


def test_plain_tensors_of_such_a_config_are_read(tmp_path: Path) -> None:
    original = save_model(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    edit_config(tmp_path, quantization_config=PLAIN)
    assert_bits({name: HFReader(tmp_path).read(name) for name in original}, original)


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
def test_an_expert_is_its_slice_with_gate_above_up(tmp_path: Path, te: bool) -> None:
    hf, arch = save_model(tmp_path, "gpt_oss"), read_architecture(tmp_path)
    whole, reader = hf[GATE_UP], HFReader(tmp_path)
    at = "decoder.layers.1.mlp.experts."
    for name, expert in (("linear_fc1.weight", 1), ("linear_fc1.bias", 2), ("linear_fc2.weight", 0)):
        own = f"{at}{name}{expert}" if te else f"{at}local_experts.{expert}.{name}"
        row = resolve(own, arch)
        (slices,) = shard_slices(row, arch, 0, 1, 1280)
        read = reader.read(row.hf[0].name, slices)
        assert read.shape[0] == 1
        found = to_megatron_shard(row, [read], arch, shard_shape(row, arch, 1, 1280))
        tensor = hf[row.hf[0].name][expert]
        expected = {
            "linear_fc1.weight": torch.cat([whole[1, :, ::2].T, whole[1, :, 1::2].T]),
            "linear_fc1.bias": torch.cat([tensor[::2], tensor[1::2]]),
            "linear_fc2.weight": tensor.transpose(0, -1),
        }
        assert torch.equal(found, expected[name])


def test_an_export_without_sinks_is_refused(tmp_path: Path) -> None:
    """Nor does one end before a tensor of all experts has each of them."""
    original, arch = save_model(tmp_path / "hf", "gpt_oss"), read_architecture(tmp_path / "hf")
    shapes = {
        name: tensor
        for row, layer, expert in whole_model(arch)
        for name, tensor in [
            (row.megatron[0].format(layer=layer, expert=expert), shard_shape(row, arch, 1, VOCAB))
        ]
    }
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    how: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "padded_vocab": VOCAB}
    load_into(parameters.items(), HFReader(tmp_path / "hf"), arch, **how)
    assert_bits(dict(iterate_hf_tensors(parameters.items(), arch, lambda x: [x])), original)
    for left_out, named in (
        ("softmax_offset", "self_attn.sinks"),
        ("experts.2.linear_fc1.bias", "proj_bias"),
    ):
        some = [(name, x) for name, x in parameters.items() if left_out not in name]
        export = partial(iterate_hf_tensors, some, arch, lambda x: [x])
        refused(lambda e=export: write_hf_checkpoint(tmp_path / "out", e(), tmp_path / "hf"), tmp_path, named)
