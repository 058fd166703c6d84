"""Tiny checkpoints of every family, and both conversions in one call each; no litter, no loose errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights_helpers import VOCAB, edit_config

from megatron_fspo.errors import InputError
from megatron_fspo.weights import (
    HFReader,
    Manifest,
    MegatronReader,
    expected_hf_shapes,
    read_architecture,
    read_manifest,
    stream,
    write_hf_checkpoint,
    write_megatron_checkpoint,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
EXPERTS = 3
_OWN: dict[str, dict] = {
    "llama": {
        "hidden_size": 32,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 16_384,
    },
    "qwen2": {"hidden_size": 32},
    "qwen3": {"hidden_size": 20, "head_dim": 6},
    "qwen3_moe": {
        "hidden_size": 20, "head_dim": 6, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": 10, "norm_topk_prob": True,
    },
}  # fmt: skip


def save_model(
    folder: Path, family: str, *, tied: bool = False, heads: int = 4, kv_heads: int = 2, shard_size="5GB"
) -> dict[str, Tensor]:
    """A checkpoint as transformers 5 saves it, with a tokenizer; every weight and bias random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, **_OWN[family],
    )  # fmt: skip
    torch.manual_seed(heads + kv_heads + tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
            parameter.flatten()[0] = -0.0
            parameter.flatten()[1] = 3e-40  # subnormal, and in half precision nothing
    model.save_pretrained(folder, max_shard_size=shard_size)
    for file in ("tokenizer.json", "tokenizer_config.json", "merges.txt"):
        (folder / file).write_text(f"the {file} of {family}")
    return tensors_of(folder)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All that the files hold, read by safetensors itself."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        assert not held.keys() & found.keys()
        found |= held
    return found


def recast(folder: Path, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """Rewrite the files with other dtypes."""
    for path in folder.glob("*.safetensors"):
        save_file({name: t.to(dtype_of(name)) for name, t in load_file(path).items()}, path)
    edit_config(folder, dtype=str(dtype_of("model.embed_tokens.weight")).removeprefix("torch."))
    return tensors_of(folder)


def to_megatron(source: Path, out: Path) -> Manifest:
    return write_megatron_checkpoint(out, HFReader(source), read_architecture(source))


def to_hf(source: Path, out: Path, **how) -> Manifest:
    arch, manifest = read_architecture(source), read_manifest(source)
    assert manifest is not None
    tensors = stream(MegatronReader(source, arch), expected_hf_shapes(arch))
    return write_hf_checkpoint(out, tensors, source, recorded=manifest.tensors, **how)


def assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal in every bit: 0 is not -0."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.contiguous().view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


def refused_without_a_trace(call: Callable[[], object], around: Path, *parts: str) -> None:
    """``InputError`` of one line that holds ``parts``; all below ``around`` is as it was."""
    before = contents(around)
    with pytest.raises(InputError) as caught:
        call()
    assert contents(around) == before
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with the bytes of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
