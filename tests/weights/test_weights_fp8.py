"""Block-scaled FP8 checkpoints: read as what they mean, converted to plain floats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights_helpers import (
    FAMILIES,
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
    compare,
    expected_hf_shapes,
    read_architecture,
    stream,
    write_hf_checkpoint,
)

BLOCK = [8, 7]  # no size of the models is a multiple of both
Q = "model.layers.1.self_attn.q_proj.weight"
QUANTISED = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}


def save_fp8(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Linear layers in FP8, all else in ``dtype``; returns what it means, block by block."""
    original = save_model(folder, family)
    stored, meant = {}, {}
    for name, tensor in original.items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            stored[name] = meant[name] = tensor.to(dtype)
            continue
        stored[name] = (tensor * 100).to(torch.float8_e4m3fn)
        rows, columns = (range(0, size, of) for size, of in zip(tensor.shape, BLOCK, strict=True))
        scale = torch.rand(len(rows), len(columns)) / 100
        stored[f"{name}_scale_inv"] = scale
        whole = stored[name].float()
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                whole[row : row + BLOCK[0], column : column + BLOCK[1]] *= scale[i, j]
        meant[name] = whole.to(dtype)
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config=QUANTISED, dtype=str(dtype).removeprefix("torch."))
    return meant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_value_is_read_times_the_scale_of_its_block(tmp_path: Path, dtype: torch.dtype) -> None:
    meant = save_fp8(tmp_path, "qwen3", dtype)
    reader = HFReader(tmp_path)
    assert reader.names() == meant.keys()
    assert {name: reader.dtype(name) for name in meant} == dict.fromkeys(meant, dtype)
    assert_bits({name: reader.read(name) for name in meant}, meant)
    assert_slices(reader, meant, seed=0, count=5)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_converts_to_plain_floats(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 12 rows of 20 columns, 7 of 32: never a block of scales.
    monkeypatch.setattr("megatron_fspo.weights.reader.BLOCK_BYTES", 500)
    meant = save_fp8(tmp_path / "fp8", family)
    arch = read_architecture(tmp_path / "fp8")
    to_megatron(tmp_path / "fp8", tmp_path / "megatron")
    reader = MegatronReader(tmp_path / "megatron", arch)
    assert list(compare(HFReader(tmp_path / "fp8"), reader, arch)) == []
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), meant)
    for folder in ("megatron", "back"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == "bfloat16"
        assert read_architecture(tmp_path / folder) == arch


def test_scales_of_deepseeks_own_names_belong_to_their_weights(tmp_path: Path) -> None:
    """With blocks that end inside of a tensor, among them the layer that predicts further tokens."""
    meant = save_fp8(tmp_path, "deepseek_v3")
    stored = load_file(tmp_path / "model.safetensors")
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert {name.split(".")[-2] for name in scaled if "self_attn" in name} == attention
    assert "model.layers.1.mlp.gate.weight" not in scaled
    further = {f"model.layers.2.{name.split('.', 3)[3]}": x for name, x in stored.items() if ".1." in name}
    save_file(stored | {name: x.clone() for name, x in further.items()}, tmp_path / "model.safetensors")
    edit_config(tmp_path, num_nextn_predict_layers=1)
    to_megatron(tmp_path, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), meant)


def test_fp8_is_written_to_a_plain_checkpoint_directly(tmp_path: Path) -> None:
    meant = save_fp8(tmp_path / "fp8", "qwen3")
    names = expected_hf_shapes(read_architecture(tmp_path / "fp8"))
    write_hf_checkpoint(tmp_path / "out", stream(HFReader(tmp_path / "fp8"), names), tmp_path / "fp8")
    assert_bits(tensors_of(tmp_path / "out"), meant)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


SCALE = f"{Q}_scale_inv"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "no scale": (edit_tensor(SCALE, lambda t: None), f"{Q} has no {SCALE}"),
    "a scale of nothing": (edit_tensor(Q, lambda t: None), f"{Q} has a scale"),
    "a scale of floats": (edit_tensor(Q, lambda t: t.bfloat16()), f"{Q} has a scale"),
    "another FP8": (edit_tensor(Q, lambda t: t.float().to(torch.float8_e5m2)), f"{Q} has a scale"),
    "a scale of other blocks": (edit_tensor(SCALE, lambda t: t[:-1].clone()), f"{SCALE} is F32 (2, 3)"),
    "a scale of whole numbers": (edit_tensor(SCALE, lambda t: t.int()), f"{SCALE} is I32"),
    "a scale that is infinite": (edit_tensor(SCALE, lambda t: t * torch.inf), f"{Q} is not finite"),
    "a NaN of FP8": (
        edit_tensor(Q, lambda t: t.float().fill_(torch.nan).to(t.dtype)),
        f"{Q} is not finite in bfloat16",
    ),
    "no quantization_config": (config(quantization_config=...), "no quantization_config"),
    "no object": (config(quantization_config="fp8"), "config.json: quantization_config "),
    **{
        f"{key} = {value}": (
            config(quantization_config=QUANTISED | {key: value}), "config.json: quantization_config "
        )
        for key, value in [
            ("quant_method", "gptq"), ("weight_block_size", None), ("weight_block_size", [0, 7]),
            ("weight_block_size", [8, 7, 1]),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_fp8_is_refused(tmp_path: Path, damage: Damage, message: str) -> None:
    save_fp8(tmp_path / "fp8", "qwen3")
    damage(tmp_path / "fp8")
    refused(lambda: to_megatron(tmp_path / "fp8", tmp_path / "out"), tmp_path, "/fp8", message)
