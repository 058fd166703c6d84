"""What an export, and a weight update up to the sending, take of a rank's memory: four layers of
Qwen3-30B-A3B at full width on four processes (TP4, EP4), with random weights.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/export_memory.py

The ranks hold 6 GB, and the export is as large. A shard is what a rank has of all experts, which travel in
buckets: beside its weights no rank may hold more than two experts and three buckets. --narrow has a small
model, for the test.
"""

from __future__ import annotations

import gc
import json
import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from machine import ROOT, machine, options_of
from megatron_fspo import config as options
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model.model import is_expert
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.state.hf_weights import export_hf, hf_tensors
from megatron_fspo.parallel import buckets
from megatron_fspo.parallel.groups import gather_lists
from megatron_fspo.weights import Architecture, Experts
from megatron_fspo.weights.table import expected_hf_shapes
from plan_rank import LiveBytes

RESULTS = ROOT / "benchmarks/results/export_memory.json"
WIDE = replace(PRESETS["qwen3-30b-a3b"], num_layers=4)
NARROW = replace(
    WIDE,
    hidden_size=64,
    num_heads=4,
    head_dim=32,
    vocab_size=512,
    experts=Experts(count=64, per_token=8, ffn_size=320, normalize_top_k=True),
)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=RESULTS, help="JSON: by rank what was measured")
    parser.add_argument("--narrow", action="store_true")
    args = parser.parse_args()
    arch, bucket = (NARROW, 2**17) if args.narrow else (WIDE, buckets.BUCKET_BYTES)
    buckets.BUCKET_BYTES = bucket
    model = random_model(arch)
    parameters = dict(model.chunks[0].named_parameters())
    experts = [one.nbytes for name, one in parameters.items() if is_expert(name)]
    sizes = {"weights": sum(one.nbytes for one in parameters.values()), "shard": sum(experts)}

    def update() -> None:
        for one in buckets.in_buckets(hf_tensors(model, [parameters.items()])):
            for _, tensor in one:
                tensor.contiguous()
            del tensor  # the bucket is on its way while the next is gathered

    with tempfile.TemporaryDirectory() as mine:
        folder = Path(gather_lists([mine], group=dist.group.WORLD)[0])
        if dist.get_rank() == 0:
            empty_checkpoint(folder / "source", arch)
        dist.barrier()
        grown = {
            "export": growth(lambda: export_hf(model, folder / "out", source=folder / "source")),
            "update": growth(update),
        }
        dist.barrier()
    row = {**sizes, "expert": max(experts), "bucket": bucket, **grown}
    rows = gather_lists([row], group=dist.group.WORLD)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps({"machine": machine(), "ranks": rows}, indent=1) + "\n")
        print(*rows, sep="\n")
    stop()


def random_model(arch: Architecture) -> Model:
    """A model on this rank, in bf16, filled without a copy."""
    backend, parallel = choose_backend("cpu"), options.Parallel(tensor=4, sequence=True, expert=4)
    groups = start(backend, parallel=parallel, seed=1)
    model = Model(arch, backend, groups, parallel=parallel, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, one in model.chunks[0].named_parameters():
            one.fill_(1) if one.dim() == 1 or "router" in name else one.uniform_(-0.02, 0.02)
    return model


def empty_checkpoint(folder: Path, arch: Architecture) -> None:
    """A checkpoint of zeros that takes no room on the disk: what an export reads of its source."""
    assert arch.experts is not None
    folder.mkdir()
    config = {
        "model_type": arch.model_type, "num_hidden_layers": arch.num_layers, "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads, "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim, "intermediate_size": arch.ffn_size, "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tied, "rms_norm_eps": arch.rms_norm_eps, "rope_theta": arch.rope_theta,
        "num_experts": arch.experts.count, "num_experts_per_tok": arch.experts.per_token,
        "moe_intermediate_size": arch.experts.ffn_size, "norm_topk_prob": arch.experts.normalize_top_k,
        "max_position_embeddings": arch.max_position_embeddings, "hidden_act": "silu", "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    table: dict[str, Any] = {}
    end = 0
    for name, shape in expected_hf_shapes(arch).items():
        first, end = end, end + 2 * torch.Size(shape).numel()
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [first, end]}
    header = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(stream.tell() + end)


def growth(work: Callable[[], None]) -> Mapping[str, int]:
    """By how many bytes the resident memory of this process grew at most during the work, and its tensors."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins with what is resident
    before = _peak()
    with torch.no_grad(), LiveBytes() as tensors:
        work()
    return {"resident": _peak() - before, "tensors": tensors.peak}


def _peak() -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
