"""Two ranks, tensor and sequence parallel, float64: a policy with adapters, and what it is without them.

adapters_worker.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model.lora import without_adapters
from megatron_fspo.mcore.state.hf_weights import base_tensors, scaled_adapter_tensors
from megatron_fspo.verify.cases import TEMPERATURE, make_samples, random_weights
from megatron_fspo.verify.layouts import choose_model, parse_layout
from megatron_fspo.verify.production import build, score

backend = choose_backend("cpu")
layouts = [parse_layout(f"tp2.sp{word}", world_size=2) for word in (".lora", "")]
groups = start(backend, parallel=layouts[0].parallel, seed=1)
archs = [choose_model(layout, None) for layout in layouts]
weights = random_weights(archs[0])
adapted, plain = (
    build(layout, arch, weights, backend, groups, torch.float64)
    for layout, arch in zip(layouts, archs, strict=True)
)


def scored(policy: object) -> torch.Tensor:
    return torch.cat(score(policy, "1 micro-batch", make_samples(archs[0]), TEMPERATURE).log_probs)


first = scored(adapted)
with without_adapters(adapted.chunks):
    off = scored(adapted)
out = {
    "off": (off - scored(plain)).abs().max().item(),
    "on": (first - off).abs().max().item(),
    "after": (scored(adapted) - first).abs().max().item(),
}
sent, base = dict(scaled_adapter_tensors(adapted)), dict(base_tensors(adapted))
if dist.get_rank() == 0:
    scale = archs[0].adapters.scale
    wanted = {name: weights[name].double() * (scale if "lora_B" in name else 1) for name in sent | base}
    out["tensors"] = max((wanted[name] - got).abs().max().item() for name, got in (sent | base).items())
    out["names"] = sorted(weights.keys() - sent.keys() - base.keys())
    Path(sys.argv[1]).write_text(json.dumps(out), encoding="utf-8")
stop()
