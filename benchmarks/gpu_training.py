"""The whole trainer on one GPU: a random model of a published shape samples, is graded and trained.

    python benchmarks/gpu_training.py --model qwen3-1.7b --out benchmarks/results/NAME.json

The run is that of examples/qwen3_8b on one process, with the embedded sampler and rewards at random: what it
takes, not what it learns. Beside each figure stands what ``megatron-fspo plan`` says of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import zlib
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from machine import ROOT, environment, options_of
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.plan.plan import Given, make_plan
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.record.rows import METRICS, read_rows
from megatron_fspo.types import Completion, Prompt
from megatron_fspo.weights import Architecture, expected_hf_shapes

MAKE_SUM = ROOT / "examples/make_sum"
KEYS = {
    "parallel.tensor": "1",
    "parallel.sequence": "false",
    "data.train": str(MAKE_SUM / "train.jsonl"),
    "data.validation": str(MAKE_SUM / "validation.jsonl"),
    "data.template": "none",
    "data.max_prompt_tokens": "8",
    "reward.name": "gpu_training:at_random",
    "rollout.prompts": "32",
    "rollout.samples": "8",
    "rollout.max_response_tokens": "1024",
    "rollout.old_log_probs": "recompute",
    "loss.calibrate": "0",
    "optimizer.warmup_steps": "0",
    "evaluation.every": "0",
    "checkpoint.every": "0",
    "log.wandb": "off",
}


def at_random(prompt: Prompt, completion: Completion, response: str) -> float:
    """A grade that groups differ in."""
    return float(zlib.crc32(response.encode()) % 2)


def make_checkpoint(arch: Architecture, folder: Path) -> None:
    """Random weights in bf16, make-sum's tokenizer filled up to the vocabulary."""
    folder.mkdir()
    dense = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": arch.num_layers, "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads, "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim, "intermediate_size": arch.ffn_size, "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tied, "rms_norm_eps": arch.rms_norm_eps, "rope_theta": arch.rope_theta,
        "max_position_embeddings": arch.max_position_embeddings, "attention_bias": False,
    }  # fmt: skip
    for name in ("config", "tokenizer_config", "generation_config", "tokenizer"):
        content = json.loads((MAKE_SUM / f"checkpoint/{name}.json").read_text(encoding="utf-8"))
        if name == "config":
            ids = {key: value for key, value in content.items() if key.endswith("token_id")}
            content = dense | ids
        if name == "tokenizer":
            vocab = content["model"]["vocab"]
            vocab |= {f"<{i}>": i for i in range(len(vocab), arch.vocab_size)}
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {}
    for name, shape in expected_hf_shapes(arch).items():
        weight = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 2:
            weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Run, print and write."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--model", choices=[name for name in PRESETS if "qwen3" in name], default="qwen3-1.7b"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keys", nargs=argparse.REMAINDER, default=[], help="of the run, in the end")
    args = parser.parse_args()
    arch = PRESETS[args.model]
    with TemporaryDirectory() as folder:
        checkpoint, run = Path(folder, "model"), Path(folder, "run")
        make_checkpoint(arch, checkpoint)
        keys = KEYS | {
            "model.checkpoint": str(checkpoint),
            "run.name": run.name,
            "run.folder": folder,
            "run.steps": str(args.steps),
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", value)] + args.keys
        base = ROOT / "examples/qwen3_8b/run.toml"
        planned = plan_of(words, base, arch)
        command = [sys.executable, "-m", "megatron_fspo", "train", "--config", str(base), *words]
        paths = [str(ROOT / "benchmarks"), environment()["PYTHONPATH"]]  # the first for the reward
        subprocess.run(command, check=True, cwd=ROOT, env=environment(PYTHONPATH=os.pathsep.join(paths)))
        rows = list(read_rows(run / METRICS))
    # The first step has Triton and cuDNN compile.
    later = rows[1:] or rows
    measured = {
        key: statistics.median(row[key] for row in later)
        for key in later[0]
        if key.startswith(("timing_s/", "perf/")) and isinstance(later[0][key], float)
    }
    found = {
        "model": args.model,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "keys": args.keys,
        "measured": measured,
        "first_step": rows[0],
        "planned": planned,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


def plan_of(words: list[str], base: Path, arch: Architecture) -> dict[str, Any]:
    """Bytes and seconds that the plan says, responses as long as they may be."""
    config = load_config([base], words)
    given = Given(world=1, mean_prompt=5, mean_response=config.rollout.max_response_tokens)
    plan = make_plan(config, arch, given)
    return {
        "always": plan.worst.always,
        "phases": plan.worst.phases,
        "total": plan.worst.total,
        "seconds": [asdict(phase) for phase in plan.phases],
    }


if __name__ == "__main__":
    main()
