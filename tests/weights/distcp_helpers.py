"""Distributed checkpoints written by hand, chunk by chunk, as ranks of some layout would; no code of ours."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from weights_helpers import EXPERTS

Chunks = list[tuple[tuple[int, ...], Tensor]]
"""Offsets and values."""
LAYERS, PADDED = 2, 1280


def save_distcp(
    folder: Path, tensors: dict[str, tuple[tuple[int, ...], Chunks]], objects: dict[str, Any], files: int = 2
) -> None:
    """Key → (global shape, chunks); chunks go to the files in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    index = Metadata(state_dict_metadata={}, storage_data={})
    streams = [open(folder / f"__{rank}_0.distcp", "wb") for rank in range(files)]

    def append(where: MetadataIndex, value: Any) -> None:
        stream = streams[len(index.storage_data) % files]
        first = stream.tell()
        torch.save(value, stream)
        info = _StorageInfo(Path(stream.name).name, first, stream.tell() - first)
        index.storage_data[where] = info

    for key, (shape, chunks) in tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(at), values.shape) for at, values in chunks]
        properties = TensorProperties(dtype=chunks[0][1].dtype)
        index.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
        for at, values in chunks:
            append(MetadataIndex(key, torch.Size(at)), values.clone())
    for key, value in objects.items():
        index.state_dict_metadata[key] = BytesStorageMetadata()
        append(MetadataIndex(key), value)
    for stream in streams:
        stream.close()
    torch.save({"iteration": 7}, folder / "common.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def by_rows(parts: list[Tensor]) -> Chunks:
    """Parts one below the other, each with its first row."""
    firsts = [sum(part.shape[0] for part in parts[:i]) for i in range(len(parts))]
    return [((first, *[0] * (part.dim() - 1)), part) for first, part in zip(firsts, parts, strict=True)]


def by_columns(whole: Tensor, tp: int) -> Chunks:
    parts = whole.chunk(tp, 1)
    return [((0, i * parts[0].shape[1]), part) for i, part in enumerate(parts)]


def fuse(hf: dict[str, Tensor], at: str, kind: str, heads: int, groups: int) -> Tensor:
    """Query heads of a group, its key head, its value head; the same for the next group."""
    q, k, v = (hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
    size, per_group = k.shape[0] // groups, heads // groups
    parts = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            parts.append(q[head * size : (head + 1) * size])
        parts += [x[group * size : (group + 1) * size] for x in (k, v)]
    return torch.cat(parts)


def gated(gate: Tensor, up: Tensor, tp: int) -> Chunks:
    """Each rank saves its part of gate and its part of up; the whole is gate above up."""
    return by_rows([*gate.chunk(tp), *up.chunk(tp)])


def layer_chunks(hf: dict[str, Tensor], layer: int, tp: int, heads: int, groups: int) -> dict[str, Chunks]:
    """What a layer saves, by the end of its key, without the dimensions of layers and experts."""
    at = f"model.layers.{layer}."
    moe = f"{at}mlp.gate.weight" in hf
    found: dict[str, Chunks] = {
        "self_attention.linear_qkv.layer_norm_weight": by_rows([hf[f"{at}input_layernorm.weight"]]),
        "self_attention.linear_qkv.weight": by_rows([*fuse(hf, at, "weight", heads, groups).chunk(tp)]),
        "self_attention.linear_proj.weight": by_columns(hf[f"{at}self_attn.o_proj.weight"], tp),
        ("pre_mlp_layernorm.weight" if moe else "mlp.linear_fc1.layer_norm_weight"): by_rows(
            [hf[f"{at}post_attention_layernorm.weight"]]
        ),
    }
    if f"{at}self_attn.q_proj.bias" in hf:
        bias = fuse(hf, at, "bias", heads, groups)
        found["self_attention.linear_qkv.bias"] = by_rows([*bias.chunk(tp)])
    if f"{at}self_attn.q_norm.weight" in hf:
        for x in "qk":
            found[f"self_attention.{x}_layernorm.weight"] = by_rows([hf[f"{at}self_attn.{x}_norm.weight"]])
    if not moe:
        found["mlp.linear_fc1.weight"] = gated(*(hf[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")), tp)
        found["mlp.linear_fc2.weight"] = by_columns(hf[f"{at}mlp.down_proj.weight"], tp)
        return found
    found["mlp.router.weight"] = by_rows([hf[f"{at}mlp.gate.weight"]])
    for expert in range(EXPERTS):
        gate, up, down = (hf[f"{at}mlp.experts.{expert}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        for name, chunks in (("linear_fc1", gated(gate, up, tp)), ("linear_fc2", by_columns(down, tp))):
            whole = found.setdefault(f"mlp.experts.experts.{name}.weight", [])
            whole += [((expert, *place), part[None]) for place, part in chunks]
    return found


def vocabulary(table: Tensor, tp: int) -> Chunks:
    """Padded; what is there must not matter."""
    padding = torch.full((PADDED - table.shape[0], table.shape[1]), torch.nan)
    return by_rows([*torch.cat([table, padding]).chunk(tp)])


def sizes(chunks: Chunks) -> tuple[int, ...]:
    """Of the smallest tensor that holds all."""
    ends = [[o + s for o, s in zip(at, part.shape, strict=True)] for at, part in chunks]
    return tuple(map(max, zip(*ends, strict=True)))


def put_together(chunks: Chunks) -> Tensor:
    whole = torch.full(sizes(chunks), torch.nan)
    for at, part in chunks:
        whole[tuple(slice(o, o + s) for o, s in zip(at, part.shape, strict=True))] = part
    return whole


def model_chunks(
    hf: dict[str, Tensor], how: str, tp: int, heads: int, groups: int
) -> dict[str, tuple[tuple[int, ...], Chunks]]:
    """The whole model for :func:`save_distcp`.

    ``how`` says where the layers are: ``stacked`` along a dimension, ``numbered`` in the keys, or all in one
    chunk that ``spans`` them.
    """
    mixtral = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    hf = {".".join(mixtral.get(word, word) for word in name.split(".")): x for name, x in hf.items()}
    chunks: dict[str, Chunks] = {
        "embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"], tp),
        "decoder.final_layernorm.weight": by_rows([hf["model.norm.weight"]]),
    }
    if "lm_head.weight" in hf:
        chunks["output_layer.weight"] = vocabulary(hf["lm_head.weight"], tp)
    for layer in range(LAYERS):
        for key, held in layer_chunks(hf, layer, tp, heads, groups).items():
            if how == "numbered":
                chunks[f"decoder.layers.{layer}.{key}"] = held
            else:
                stacked = [((layer, *place), part[None]) for place, part in held]
                chunks[f"decoder.layers.{key}"] = chunks.get(f"decoder.layers.{key}", []) + stacked
    if how == "spans":
        chunks |= {
            key: by_rows([put_together(held)]) for key, held in chunks.items() if key.startswith("decoder")
        }
    return {key: (sizes(held), held) for key, held in chunks.items()}
