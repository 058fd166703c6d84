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
    rows = q.shape[0] // heads  # twice the size with gates
    parts = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            parts.append(q[head * rows : (head + 1) * rows])
        parts += [x[group * size : (group + 1) * size] for x in (k, v)]
    return torch.cat(parts)


def gated(gate: Tensor, up: Tensor, tp: int) -> Chunks:
    """Each rank saves its part of gate and its part of up; the whole is gate above up."""
    return by_rows([*gate.chunk(tp), *up.chunk(tp)])


def attention_chunks(hf: dict[str, Tensor], at: str, tp: int, heads: int, groups: int) -> dict[str, Chunks]:
    if f"{at}self_attn.kv_b_proj.weight" in hf:  # heads of a column are in order; all else is on every rank
        names = {"q_down": "q_a_proj", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa"}
        found = {"input_layernorm.weight": by_rows([hf[f"{at}input_layernorm.weight"]])}
        for ours, theirs in (names | {"kv_up": "kv_b_proj"}).items():
            matrix = hf[f"{at}self_attn.{theirs}.weight"]
            parts = matrix.chunk(tp if "up" in ours else 1)
            found[f"self_attention.linear_{ours}_proj.weight"] = by_rows([*parts])
        for x in ("q", "kv"):
            norm = hf[f"{at}self_attn.{x}_a_layernorm.weight"]
            found[f"self_attention.linear_{x}_up_proj.layer_norm_weight"] = by_rows([norm])
        return found
    found = {"self_attention.linear_qkv.weight": by_rows([*fuse(hf, at, "weight", heads, groups).chunk(tp)])}
    if f"{at}input_layernorm.weight" in hf:
        norm = hf[f"{at}input_layernorm.weight"]
        found["self_attention.linear_qkv.layer_norm_weight"] = by_rows([norm])
    if f"{at}self_attn.q_proj.bias" in hf:
        bias = fuse(hf, at, "bias", heads, groups)
        found["self_attention.linear_qkv.bias"] = by_rows([*bias.chunk(tp)])
    for x in "qk":
        if f"{at}self_attn.{x}_norm.weight" in hf:
            norm, rows = hf[f"{at}self_attn.{x}_norm.weight"], hf[f"{at}self_attn.{x}_proj.weight"].shape[0]
            parts = norm.chunk(tp if len(norm) == rows else 1)  # of all heads, or of one
            found[f"self_attention.{x}_layernorm.weight"] = by_rows([*parts])
    if f"{at}self_attn.sinks" in hf:
        sinks = hf[f"{at}self_attn.sinks"].chunk(tp)
        found["self_attention.core_attention.softmax_offset"] = by_rows([*sinks])
    return found


def delta_chunks(hf: dict[str, Tensor], at: str, tp: int) -> dict[str, Chunks]:
    """A gated delta net with two key heads: the rows of the first head's group, then the second's."""
    net = {name.removeprefix(at + "linear_attn."): x for name, x in hf.items() if name.startswith(at)}
    sizes = (2 * 6, 2 * 6, 4 * 10)
    separate = [net[f"in_proj_{x}.weight"] for x in ("qkvz", "ba") if f"in_proj_{x}.weight" in net]
    if not separate:
        qkv, *others = (net[f"in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a"))
        separate = [*qkv.split(sizes), *others]
    conv = net["conv1d.weight"].split(sizes)
    grouped = [
        torch.cat([part.chunk(2)[group] for group in range(2) for part in parts])
        for parts in (separate, conv)
    ]
    return {
        "self_attention.in_proj.layer_norm_weight": by_rows([hf[f"{at}input_layernorm.weight"]]),
        "self_attention.in_proj.weight": by_rows([*grouped[0].chunk(tp)]),
        "self_attention.conv_weight": by_rows([*grouped[1].chunk(tp)]),
        **{f"self_attention.{x}": by_rows([*net[x].chunk(tp)]) for x in ("A_log", "dt_bias")},
        "self_attention.out_norm.weight": by_rows([net["norm.weight"]]),
        "self_attention.out_proj.weight": by_columns(net["out_proj.weight"], tp),
    }


def mlp_chunks(hf: dict[str, Tensor], at: str, name: str, tp: int) -> dict[str, Chunks]:
    gate, up, down = (hf[f"{at}.{x}_proj.weight"] for x in ("gate", "up", "down"))
    found = {
        f"{name}.linear_fc1.weight": gated(gate, up, tp),
        f"{name}.linear_fc2.weight": by_columns(down, tp),
    }
    if f"{at}.up_proj.bias" in hf:
        gate, up, down = (hf[f"{at}.{x}_proj.bias"] for x in ("gate", "up", "down"))
        found[f"{name}.linear_fc1.bias"] = gated(gate, up, tp)
        found[f"{name}.linear_fc2.bias"] = by_rows([down])
    return found


# On every rank, where a model has it.
WHOLE = {
    "post_self_attn_layernorm.weight": "self_attn_bda.norm.weight",
    "post_mlp_layernorm.weight": "mlp_bda.norm.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "mlp.gate.bias": "mlp.router.bias",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
}


def layer_chunks(hf: dict[str, Tensor], layer: int, tp: int, heads: int, groups: int) -> dict[str, Chunks]:
    """What a layer saves, by the end of its key, without the dimensions of layers and experts."""
    at = f"model.layers.{layer}."
    moe = f"{at}mlp.gate.weight" in hf
    found: dict[str, Chunks] = {}
    if f"{at}post_attention_layernorm.weight" in hf:
        norm = by_rows([hf[f"{at}post_attention_layernorm.weight"]])
        found["pre_mlp_layernorm.weight" if moe else "mlp.linear_fc1.layer_norm_weight"] = norm
    if f"{at}linear_attn.A_log" in hf:
        found |= delta_chunks(hf, at, tp)
    else:
        found |= attention_chunks(hf, at, tp, heads, groups)
        found["self_attention.linear_proj.weight"] = by_columns(hf[f"{at}self_attn.o_proj.weight"], tp)
    found |= {ours: by_rows([hf[at + theirs]]) for theirs, ours in WHOLE.items() if at + theirs in hf}
    if not moe:
        return found | mlp_chunks(hf, f"{at}mlp", "mlp", tp)
    found["mlp.router.weight"] = by_rows([hf[f"{at}mlp.gate.weight"]])
    for shared in ("shared_expert", "shared_experts"):
        if f"{at}mlp.{shared}.up_proj.weight" in hf:
            found |= mlp_chunks(hf, f"{at}mlp.{shared}", "mlp.shared_experts", tp)
    for expert in range(EXPERTS):
        for name, chunks in mlp_chunks(hf, f"{at}mlp.experts.{expert}", "mlp.experts.experts", tp).items():
            found[name] = found.get(name, []) + [((expert, *place), part[None]) for place, part in chunks]
    return found


def unfused(hf: dict[str, Tensor], heads: int, groups: int) -> dict[str, Tensor]:
    """Mixtral's, Gemma's and OLMo's names, and what Phi-3 and GLM-4 have as one tensor, as in others."""
    named = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    if "model.layers.0.post_feedforward_layernorm.weight" in hf:
        named |= {
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        }
    found = {}
    for name, x in hf.items():
        if "qkv_proj" in name:
            size = x.shape[0] // (heads + 2 * groups)
            parts = zip("qkv", x.split([heads * size, groups * size, groups * size]), strict=True)
            found |= {name.replace("qkv_proj", f"{part}_proj"): values for part, values in parts}
        elif ".mlp.experts.gate_up_proj" in name or ".mlp.experts.down_proj" in name:
            found |= of_gpt_oss(name, x)
        elif ".mlp.router." in name:
            found[name.replace("router", "gate")] = x
        elif "gate_up_proj" in name:
            parts = zip(("gate_proj", "up_proj"), x.chunk(2), strict=True)
            found |= {name.replace("gate_up_proj", part): values for part, values in parts}
        else:
            found[".".join(named.get(word, word) for word in name.split("."))] = x
    return found


def of_gpt_oss(name: str, x: Tensor) -> dict[str, Tensor]:
    """Its tensor of all experts, of which each has rows for inputs, as those of other families."""
    block, _, word = name.rpartition(".")
    kind = "bias" if word.endswith("_bias") else "weight"
    found = {}
    for number, expert in enumerate(x):
        outputs = expert if kind == "bias" else expert.T
        parts = {"gate": outputs[::2], "up": outputs[1::2]} if "gate" in word else {"down": outputs}
        found |= {f"{block}.{number}.{part}_proj.{kind}": values for part, values in parts.items()}
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
    chunk that ``spans`` them. Megatron numbers layers that differ, whatever it is told.
    """
    hf = unfused(hf, heads, groups)
    differ = "model.layers.0.mlp.up_proj.weight" in hf and "model.layers.1.mlp.gate.weight" in hf
    differ = differ or "model.layers.0.linear_attn.A_log" in hf
    chunks: dict[str, Chunks] = {
        "embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"], tp),
        "decoder.final_layernorm.weight": by_rows([hf["model.norm.weight"]]),
    }
    if "lm_head.weight" in hf:
        chunks["output_layer.weight"] = vocabulary(hf["lm_head.weight"], tp)
    for layer in range(LAYERS):
        for key, held in layer_chunks(hf, layer, tp, heads, groups).items():
            if differ or how == "numbered":
                chunks[f"decoder.layers.{layer}.{key}"] = held
            else:
                stacked = [((layer, *place), part[None]) for place, part in held]
                chunks[f"decoder.layers.{key}"] = chunks.get(f"decoder.layers.{key}", []) + stacked
    if how == "spans":
        chunks |= {
            key: by_rows([put_together(held)]) for key, held in chunks.items() if key.startswith("decoder")
        }
    return {key: (sizes(held), held) for key, held in chunks.items()}
