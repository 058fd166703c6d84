"""Bytes of weight updates with `vllm.delta`: SmolLM2-135M, trainer and vLLM server in bfloat16.

    make runs/smollm2/checkpoint/config.json
    VLLM_BIN=.venv-vllm/bin/vllm python benchmarks/delta_sync.py

A step is 4 prompts with 4 responses of at most 32 tokens, in 4 optimizer steps: only bytes matter here.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from machine import ROOT, environment, machine, markdown, options_of, vllm_server

CHECKPOINT = "runs/smollm2/checkpoint"
RATES = ("1e-6", "1e-5")
BLOCK = 2**16  # elements, for each of which a message has a count
UPDATES = 4  # optimizer steps of a step
TRAINING = (
    "--model.dtype bfloat16 --rollout.engine vllm --vllm.delta true --optimizer.warmup-steps 0 "
    "--rollout.prompts 4 --rollout.samples 4 --rollout.max-response-tokens 32 --loss.calibrate 0 "
    "--checkpoint.every 0 --reward.max-zero-variance-steps 0 --parallel.silence-seconds 600"
).split()


def train(folder: Path, url: str, rate: str, steps: int) -> list[dict[str, float]]:
    """Bytes of the update after each step, and how far its canary is off."""
    words = [sys.executable, "-m", "megatron_fspo", "train", "--config", "examples/smollm2/run.toml"]
    words += ["--nproc", "1", "--run.folder", str(folder), "--run.name", rate, "--run.steps", str(steps)]
    words += ["--vllm.urls", f"['{url}']", "--optimizer.lr", rate, *TRAINING]
    subprocess.run(words, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / rate / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    if len(rows) != steps or any(row["rollout/weights_proven"] != 1 for row in rows):
        sys.exit("not every update was proven")
    return [{name: row[f"rollout/{name}"] for name in ("sent_bytes", "canary_abs_diff")} for row in rows]


def most(weights: Sequence[Tensor], rate: float) -> float:
    """Share of elements that a step would change if each optimizer step moved all by the learning rate, in
    one direction, and masters lay anywhere between two values of bfloat16."""
    steps = [torch.exp2(torch.frexp(weight.float()).exponent - 8.0).flatten() for weight in weights]
    return (UPDATES * rate / torch.cat(steps)).clamp(max=1).mean().item()


def table(report: Mapping[str, Any]) -> str:
    """Markdown: MB, and shares of the whole."""
    whole, empty = report["bytes"], report["bytes_of_counts"]
    rows = []
    for rate, steps in report["runs"].items():
        sent, canary = ([step[name] for step in steps] for name in ("sent_bytes", "canary_abs_diff"))
        moved = [2 * (one - empty) / 4 / whole for one in sent]
        rows.append(
            [
                rate,
                *(f"{one / 1e6:.1f}" for one in (sent[0], fmean(sent), sent[-1])),
                f"{fmean(sent) / whole:.1%}",
                f"{fmean(moved):.2%}",
                f"{report['most'][rate]:.1%}",
                f"{min(canary):.2f}–{max(canary):.2f}",
            ]
        )
    head = ["lr", "after step 1, MB", "mean", "after the last", "of all bytes", "elements moved", "at most"]
    head += ["canary, nats"]
    return markdown(head, rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8191, help="of the server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/delta_sync.json")
    options = parser.parse_args()
    if not (ROOT / CHECKPOINT).exists():
        sys.exit(f"no {CHECKPOINT}: `make {CHECKPOINT}/config.json` makes it")
    weights = [*load_file(ROOT / CHECKPOINT / "model.safetensors").values()]
    sizes = [weight.numel() for weight in weights]
    runs = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("--dtype", "bfloat16", "--", "--max-model-len", "256")
        with vllm_server(CHECKPOINT, options.port, folder / "vllm.log", *flags) as url:
            for rate in RATES:
                runs[rate] = train(folder, url, rate, options.steps)
                print(rate, *(f"{step['sent_bytes'] / 1e6:.1f}" for step in runs[rate]), "MB", flush=True)
    report = {
        "command": shlex.join(["python", "benchmarks/delta_sync.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        **machine(),
        "bytes": 2 * sum(sizes),
        "bytes_of_counts": sum(4 * -(-size // BLOCK) for size in sizes),
        "runs": runs,
        "most": {rate: most(weights, float(rate)) for rate in RATES},
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
