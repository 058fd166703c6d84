"""Multimodal checkpoints: the text model is read and written, all else is copied; experts may be stacked."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights_helpers import SIZES, assert_bits, assert_slices, refused

import tiny_families
from megatron_fspo.weights import (
    HFReader,
    expected_hf_shapes,
    read_architecture,
    stream,
    write_hf_checkpoint,
    write_megatron_checkpoint,
)
from megatron_fspo.weights.load import check_checkpoint, check_tied_copies

QWEN: dict[str, Any] = {
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16, "patch_size": 4,
    },
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
        "image_size": 8, "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip


def save(folder: Path, family: str) -> dict[str, Tensor]:
    """As transformers saves it, and a tensor for further tokens."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {**SIZES, "vocab_size": 61, "num_attention_heads": 4, "num_key_value_heads": 2}
    tied = family == "gemma3"
    text = tiny_families.config(f"{family}_text", sizes, tie_word_embeddings=tied).to_dict()
    more = GEMMA if tied else QWEN
    config = AutoConfig.for_model(
        family, text_config=text, tie_word_embeddings=tied, dtype="float32", **copy.deepcopy(more)
    )
    torch.manual_seed(1)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    later = {} if tied else {"mtp.norm.weight": torch.ones(32)}
    save_file(tensors | later, folder / "model.safetensors", {"format": "pt"})
    return tensors


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of a layer in one tensor for gate and up, and one for down, as on the Hub."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            found[name] = tensor
            continue
        block, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        experts.setdefault(block, {})[int(number), part] = tensor
    for block, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        pairs = [torch.cat([parts[n, "gate_proj"], parts[n, "up_proj"]]) for n in numbers]
        found[f"{block}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{block}.experts.down_proj"] = torch.stack([parts[n, "down_proj"] for n in numbers])
    return found


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gemma 3's as their modules are called, as trainers that do not go through transformers write them."""
    names = {
        name: f"model.{name}".replace("model.language_model.model.", "model.language_model.")
        for name in tensors
    }
    return {names[name]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "gemma3"])
def test_the_rest_is_copied_and_the_export_is_the_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    original = save(tmp_path / "model", family)
    vision = {name for name in original if "visual." in name or name.startswith(("vision", "multi"))}
    arch = read_architecture(tmp_path / "model")
    assert len(vision) > 10 and expected_hf_shapes(arch).keys() == original.keys() - vision
    check_checkpoint(HFReader(tmp_path / "model"), arch)
    others = renamed(original) if family == "gemma3" else stacked(original)
    save_file(others, tmp_path / "model/model.safetensors", {"format": "pt"})
    reader = HFReader(tmp_path / "model")
    check_checkpoint(reader, arch)
    assert reader.names() == original.keys()
    assert_slices(reader, original, seed=3)
    tensors = list(stream(reader, expected_hf_shapes(arch), lambda _: None))
    write_hf_checkpoint(tmp_path / "out", tensors, tmp_path / "model")
    assert_bits(load_file(tmp_path / "out/model.safetensors"), original)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = [
            AutoModelForImageTextToText.from_pretrained(tmp_path / name, experts_implementation="eager")(
                ids
            ).logits
            for name in ("model", "out")
        ]
    assert torch.equal(*logits)
    write_hf_checkpoint(tmp_path / "half", tensors, tmp_path / "model", dtype=torch.bfloat16)
    half = load_file(tmp_path / "half/model.safetensors")
    assert {name for name, tensor in half.items() if tensor.dtype == torch.float32} == vision
    assert read_architecture(tmp_path / "half").dtype == torch.bfloat16
    named = f"has {min(vision)}"
    refused(lambda: write_megatron_checkpoint(tmp_path / "distcp", reader, arch), tmp_path, named)


def test_parts_that_contradict_the_whole_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_5")
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(
        lambda: read_architecture(tmp_path), tmp_path, "dtype is 'bfloat16', but in text_config 'float32'"
    )


def test_stacked_experts_with_a_row_too_many_are_refused(tmp_path: Path) -> None:
    tensors = stacked(save(tmp_path, "qwen3_5_moe"))
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[name] = torch.cat([tensors[name], tensors[name][:, :1]], 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refused(lambda: HFReader(tmp_path), tmp_path, "rows, not as many of gate as of up")


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = save(tmp_path, "gemma3")
    name = "model.language_model.norm.weight"
    more = {
        name: torch.ones(32),
        "language_model.lm_head.weight": tensors["language_model.model.embed_tokens.weight"] + 0,
    }
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    refused(
        lambda: HFReader(tmp_path), tmp_path, f"{name} is another name of language_model.model.norm.weight"
    )
    del more[name]
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    reader, arch = HFReader(tmp_path), read_architecture(tmp_path)
    check_checkpoint(reader, arch)
    check_tied_copies(reader, arch)
    more["language_model.lm_head.weight"][0, 0] += 1
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    refused(lambda: check_tied_copies(HFReader(tmp_path), arch), tmp_path, "config.json ties the two")
