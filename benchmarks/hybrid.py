"""Do gated delta nets learn? make-sum with a little Qwen3.5 beside the dense Qwen3, three seeds each.

    python benchmarks/hybrid.py    # six runs, an hour on a busy core
    python benchmarks/hybrid.py --steps 1 --warm-up 1 --folder /tmp/h --out /tmp/h.json    # machinery only

The Qwen3.5 has three gated delta nets and one gated full attention, as the real ones. Its warm start is
made on demonstrations, as the Qwen3's was; in the recorded runs, by a loop that SFT has replaced. Both
train with `examples/make_sum/run.toml`, but a quarter of its prompts, on one process, decoded by the
embedded engine.

Claim, written before the runs: for either family the gain of held-out reward over its warm start, mean over
seeds, is above 0 by more than its 95% t interval over seeds. Nothing is claimed about which family is better:
sizes and warm starts differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from machine import ROOT, cpu, environment, options_of
from megatron_fspo.evaluation.intervals import t_half_width

sys.path.append(str(ROOT / "examples/make_sum"))

from make_checkpoint import CONFIG, save, train
from make_sum import ALPHABET

SHAPE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": len(ALPHABET) + 1,  # transformers' tokenizer of the family adds a token
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
"""What differs from the dense configuration."""
SMALL = ("--rollout.prompts", "16", "--log.wandb", "off")
ACCURACY = "val/validation/mean@64"
"""Held-out reward of 64 responses a prompt."""
DENSE = ROOT / "examples/make_sum/checkpoint"


def make_checkpoint(folder: Path, steps: int) -> None:
    """The Qwen3.5 after so many steps on demonstrations."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = {**CONFIG, **SHAPE}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    save(train(model, config, steps=steps, seed=0, calls=None), config, folder)


def rewards(folder: Path, checkpoint: Path, seed: int, words: Sequence[str]) -> dict[str, Any]:
    """Of a run, made unless it is there: held-out reward at the warm start and at the end; the largest
    difference of a log-prob between engine and trainer in the first step, nats; seconds of all steps."""
    if not (folder / "hf").exists():
        command = [sys.executable, "-m", "megatron_fspo", "train", "--config", "examples/make_sum/run.toml"]
        keys = {"run.folder": folder.parent, "run.name": folder.name, "run.seed": seed}
        keys |= {"model.checkpoint": checkpoint, "parallel.tensor": 1, "parallel.sequence": "false"}
        given = (word for key, value in keys.items() for word in (f"--{key}", str(value)))
        subprocess.run([*command, *given, *words], cwd=ROOT, env=environment(), check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [row[ACCURACY] for row in rows if ACCURACY in row]
    (first,) = (row for row in rows if row["step"] == 1)
    return {
        "seed": seed,
        "start": held_out[0],
        "end": held_out[-1],
        "mismatch": first["rollout/logprob_abs_diff/max"],
        "seconds": sum(row.get("timing_s/step", 0) for row in rows),
    }


def table(found: Mapping[str, Any]) -> str:
    """Lines for docs/adding_a_model.md: means over seeds with 95% t intervals."""
    lines = [f"{'held-out reward':<16}{'warm start':>16}{'end':>16}{'gain':>16}"]
    for family, runs in found["runs"].items():
        columns = ([run["start"] for run in runs], [run["end"] for run in runs])
        columns += ([end - start for start, end in zip(*columns, strict=True)],)
        cells = (f"{sum(one) / len(one):.3f} ± {t_half_width(one):.3f}" for one in columns)
        lines.append(f"{family:<16}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Make the runs; print a table; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/hybrid")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=300, help="steps on demonstrations")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/hybrid.json")
    args, words = parser.parse_known_args()
    folder = args.folder.resolve()
    if not (folder / "checkpoint").exists():
        make_checkpoint(folder / "checkpoint", args.warm_up)
    found: dict[str, Any] = {"cpu": cpu(), "torch": torch.__version__, "steps": args.steps, "words": words}
    words = [*SMALL, "--run.steps", str(args.steps), "--evaluation.every", str(args.steps), *words]
    families = {"Qwen3": DENSE, "Qwen3.5": folder / "checkpoint"}
    found["runs"] = {
        family: [rewards(folder / f"{family}-{seed}", checkpoint, seed, words) for seed in args.seeds]
        for family, checkpoint in families.items()
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
