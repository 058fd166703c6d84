"""Tiny checkpoints of every family, Megatron's parameters written out by hand, conversions, and damage.

No shape and no name of Megatron's comes from the table.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_families
from megatron_fspo.errors import InputError
from megatron_fspo.weights import (
    HFReader,
    Manifest,
    MegatronReader,
    Reader,
    expected_hf_shapes,
    iterate_hf_tensors,
    load_into,
    read_architecture,
    read_manifest,
    stream,
    write_hf_checkpoint,
    write_megatron_checkpoint,
)
from megatron_fspo.weights.hf_config import SUPPORTED

FAMILIES = SUPPORTED
LAYERS, HIDDEN, FFN, HEAD_DIM, VOCAB = 2, 20, 24, 6, tiny_families.VOCAB
EXPERTS = 3
SIZES = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), EXPERTS),
    "hidden_size": 32, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "head_dim": 8, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 12, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "max_position_embeddings": 128,
}  # fmt: skip


def save_model(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    heads: int = 4,
    kv_heads: int = 2,
    shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """A checkpoint as transformers 5 saves it, with a tokenizer; every weight and bias random."""
    from transformers import AutoModelForCausalLM

    narrow = {"hidden_size": HIDDEN, "head_dim": HEAD_DIM} if family in ("qwen3", "qwen3_moe") else {}
    narrow |= {"intermediate_size": 32} if family == "gpt_oss" else {}  # MXFP4 has blocks of 32
    sizes = {**SIZES, **narrow, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    torch.manual_seed(heads + kv_heads + tied)
    model = AutoModelForCausalLM.from_config(
        tiny_families.config(family, sizes, tie_word_embeddings=tied), dtype=dtype
    )
    with torch.no_grad():
        for parameter in (*model.parameters(), *tiny_families.biases(model)):
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


def assert_slices(reader: Reader, original: dict[str, Tensor], seed: int, count: int = 3) -> None:
    """Some parts of every tensor, empty ones and single rows among them."""
    dice = random.Random(seed)
    for name, tensor in original.items():
        for _ in range(count):
            part = tuple(
                slice(*sorted((dice.randint(0, size), dice.randint(0, size)))) for size in tensor.shape
            )
            assert torch.equal(reader.read(name, part), tensor[part]), (name, part)


def refused(call: Callable[[], object], around: Path, *parts: str) -> None:
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


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; ``...`` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def megatron_shapes(
    heads: int, kv_heads: int, tp: int, padded: int, *, tied: bool, stages: int = 1, stage: int = 0
) -> dict[str, tuple[int, ...]]:
    """Name and local shape of every parameter of one pipeline stage, as Megatron's GPTModel has them."""
    first, last = stage == 0, stage == stages - 1
    shapes: dict[str, tuple[int, ...]] = {}
    if first:
        shapes["embedding.word_embeddings.weight"] = (padded // tp, HIDDEN)
    for layer in range(LAYERS // stages):
        at = f"decoder.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (HIDDEN,),
            at + "self_attention.linear_proj.weight": (HIDDEN, heads * HEAD_DIM // tp),
            at + "self_attention.linear_qkv.weight": ((heads + 2 * kv_heads) * HEAD_DIM // tp, HIDDEN),
            at + "self_attention.q_layernorm.weight": (HEAD_DIM,),
            at + "self_attention.k_layernorm.weight": (HEAD_DIM,),
            at + "pre_mlp_layernorm.weight": (HIDDEN,),
            at + "mlp.linear_fc1.weight": (2 * FFN // tp, HIDDEN),
            at + "mlp.linear_fc2.weight": (HIDDEN, FFN // tp),
        }
    if last:
        shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
        if not tied or not first:
            shapes["output_layer.weight"] = (padded // tp, HIDDEN)
    return shapes


def latent_shapes(tp: int, padded: int) -> dict[str, tuple[int, ...]]:
    """The same of the DeepSeek-V3 of :data:`SIZES` with 4 heads; layer 0 is dense, layer 1 has experts."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (padded // tp, 32)}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (32,),
            at + "self_attention.linear_proj.weight": (32, 4 * 8 // tp),
            at + "self_attention.linear_q_down_proj.weight": (10, 32),
            at + "self_attention.linear_q_up_proj.weight": (4 * (6 + 4) // tp, 10),
            at + "self_attention.linear_kv_down_proj.weight": (12 + 4, 32),
            at + "self_attention.linear_kv_up_proj.weight": (4 * (6 + 8) // tp, 12),
            at + "self_attention.q_layernorm.weight": (10,),
            at + "self_attention.kv_layernorm.weight": (12,),
            at + "pre_mlp_layernorm.weight": (32,),
        }
        if layer == 0:
            shapes |= {
                at + "mlp.linear_fc1.weight": (48 // tp, 32),
                at + "mlp.linear_fc2.weight": (32, 24 // tp),
            }
            continue
        shapes |= {
            at + "mlp.router.weight": (EXPERTS, 32),
            at + "mlp.router.expert_bias": (EXPERTS,),
            at + "mlp.shared_experts.linear_fc1.weight": (20 // tp, 32),
            at + "mlp.shared_experts.linear_fc2.weight": (32, 10 // tp),
        }
        for expert in range(EXPERTS):
            shapes[at + f"mlp.experts.local_experts.{expert}.linear_fc1.weight"] = (20, 32)
            shapes[at + f"mlp.experts.local_experts.{expert}.linear_fc2.weight"] = (32, 10)
    last = {"decoder.final_layernorm.weight": (32,), "output_layer.weight": (padded // tp, 32)}
    return shapes | last


def load_ranks(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    tp: int,
    padded: int,
    layer_offset=0,
    dtype=torch.float32,
) -> tuple[list[dict[str, Tensor]], set[str]]:
    """What every tensor-parallel rank holds after loading, from parameters that start as NaN."""
    arch = read_architecture(folder)
    ranks = []
    reader = HFReader(folder)
    for rank in range(tp):
        parameters = {
            name: torch.full(shape, torch.nan, dtype=dtype, requires_grad=True)
            for name, shape in shapes.items()
        }
        loaded = load_into(
            parameters.items(), reader, arch,
            tp_rank=rank, tp_size=tp, padded_vocab=padded, layer_offset=layer_offset,
        )  # fmt: skip
        ranks.append({name: parameter.detach() for name, parameter in parameters.items()})
    return ranks, loaded


def export(folder: Path, ranks: list[dict[str, Tensor]], layer_offset: int = 0) -> list[tuple[str, Tensor]]:
    """What the exporting rank yields."""
    names = iter(ranks[0])
    copies = {"output_layer.weight"} if read_architecture(folder).tied else set()

    def gather(shard: Tensor) -> list[Tensor]:
        name = next(name for name in names if name not in copies)
        assert shard.data_ptr() == ranks[0][name].data_ptr()
        return [shard] if ".local_experts." in name else [rank[name] for rank in ranks]

    return list(iterate_hf_tensors(ranks[0].items(), read_architecture(folder), gather, layer_offset))


# Damage.

Damage = Callable[[Path], object]
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def config(**changes: Any) -> Damage:
    """Set keys of config.json; ``...`` removes one."""
    return lambda folder: edit_config(folder, **changes)


def edit_tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """Replace one tensor of the single file, or drop it where ``change`` returns None."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / ONE)
        new = change(tensors.pop(name, torch.zeros(3)))
        save_file(tensors if new is None else tensors | {name: new}, folder / ONE)

    return damage


def put(value: float) -> Callable[[Tensor], Tensor]:
    """A change of one value, the last row's."""
    return lambda tensor: tensor.index_put((torch.tensor(-1),), torch.tensor(value))


def cut(size: int, file: str | Path = ONE) -> Damage:
    """Keep the first ``size`` bytes of a file, or drop its last ones where it is negative."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])
