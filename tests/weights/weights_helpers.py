"""Tiny Qwen3 checkpoints, and Megatron's parameters written out by hand: nothing comes from the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_fspo.weights import HFReader, iterate_hf_tensors, load_into, read_architecture

LAYERS, HIDDEN, FFN, HEAD_DIM, VOCAB = 2, 20, 24, 6, 1237


def save_qwen3(
    folder: Path, *, tied: bool, heads: int = 4, kv_heads: int = 2, dtype=torch.float32, seed=0
) -> dict:
    """A checkpoint as transformers saves it, every weight random (norms too); returns its tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM, tie_word_embeddings=tied,
        max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; ``...`` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def megatron_shapes(
    heads: int,
    kv_heads: int,
    tp: int,
    padded: int,
    *,
    tied: bool,
    stages: int = 1,
    stage: int = 0,
    te: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Name and local shape of every parameter of one pipeline stage, as Megatron's GPTModel has them."""
    first, last = stage == 0, stage == stages - 1
    shapes: dict[str, tuple[int, ...]] = {}
    if first:
        shapes["embedding.word_embeddings.weight"] = (padded // tp, HIDDEN)
    for layer in range(LAYERS // stages):
        at = f"decoder.layers.{layer}."
        shapes |= {
            at + ("self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"): (
                HIDDEN,
            ),
            at + "self_attention.linear_proj.weight": (HIDDEN, heads * HEAD_DIM // tp),
            at + "self_attention.linear_qkv.weight": ((heads + 2 * kv_heads) * HEAD_DIM // tp, HIDDEN),
            at + "self_attention.q_layernorm.weight": (HEAD_DIM,),
            at + "self_attention.k_layernorm.weight": (HEAD_DIM,),
            at + ("mlp.linear_fc1.layer_norm_weight" if te else "pre_mlp_layernorm.weight"): (HIDDEN,),
            at + "mlp.linear_fc1.weight": (2 * FFN // tp, HIDDEN),
            at + "mlp.linear_fc2.weight": (HIDDEN, FFN // tp),
        }
    if last:
        shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
        if not tied or not first:
            shapes["output_layer.weight"] = (padded // tp, HIDDEN)
    return shapes


def load_ranks(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    tp: int,
    padded: int,
    layer_offset: int = 0,
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
        return [rank[name] for rank in ranks]

    return list(iterate_hf_tensors(ranks[0].items(), read_architecture(folder), gather, layer_offset))
