"""Convert this folder's checkpoint, or DENSE, to a mixture of experts by sparse upcycling, without training.

    python examples/make_sum/make_experts.py runs/make-sum-moe/checkpoint [DENSE]

Every expert is a copy of the dense MLP plus noise. The weights of a token's experts sum to 1.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DENSE = Path(__file__).parent / "checkpoint"
EXPERTS, PER_TOKEN, NOISE = 4, 2, 0.3


def main(out: Path, dense: Path = DENSE) -> None:
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    config |= {"num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "decoder_sparse_step": 1}
    config |= {"moe_intermediate_size": config["intermediate_size"], "mlp_only_layers": []}
    shutil.copytree(dense, out, dirs_exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    generator, weights = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(dense / "model.safetensors").items():
        layer, mlp, part = name.partition(".mlp.")
        if not mlp:
            weights[name] = weight
            continue
        for expert in range(EXPERTS):
            noise = NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
            weights[f"{layer}.mlp.experts.{expert}.{part}"] = weight + noise
        router = torch.randn(EXPERTS, config["hidden_size"], generator=generator)
        weights[f"{layer}.mlp.gate.weight"] = router * config["initializer_range"]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
