"""Response tokens per second of whole steps, beside TRL's GRPOTrainer: same model, prompts, sizes and cores.

    make .venv-trl/.ready
    python benchmarks/against_trl.py examples/smollm2/run.toml examples/make_sum/run.toml

The two take turns, in float32: prompts × samples responses of at most so many tokens, then the optimizer
steps of all epochs. Both are data parallel, as TRL knows nothing else; TRL also runs as one process with
all threads, and the faster of the two is what counts. Only ratios mean anything. The learning rate is next
to nothing, so that the lengths stay what the model gives: tokens per second depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from machine import ROOT, cpu, environment, markdown, options_of
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.data.prompts import load_sets
from megatron_fspo.data.tokenizer import load_tokenizer

WORKER = Path(__file__).with_name("trl_run.py")
LEARNING_RATE = 1e-12
SKIPPED = 1
"""Steps at the beginning that are not counted: caches fill, memory is touched for the first time."""


def main() -> None:
    """Run both on each configuration, and print the ratios; results of other configurations stay."""
    parser = options_of(__doc__)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--trl", type=Path, default=ROOT / ".venv-trl/bin/python")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in turns")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/against_trl.json")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for path in args.configs:
        rates: dict[str, list[float]] = {"ours": [], "trl": [], "trl, one process": []}
        for turn in range(args.rounds):
            rates["ours"] += ours(path, args, seed=turn + 1)
            rates["trl"] += theirs(path, args, processes=args.nproc, seed=turn + 1)
            rates["trl, one process"] += theirs(path, args, processes=1, seed=turn + 1)
        results[str(path)] = {
            "machine": cpu(),
            "nproc": args.nproc,
            "tokens_per_second": rates,
        }
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


def table(results: Mapping[str, Any]) -> str:
    """Response tokens per second as multiples of TRL's better count."""
    rows = []
    for path, found in results.items():
        rates = {name: median(steps) for name, steps in found["tokens_per_second"].items()}
        best = max(rates["trl"], rates["trl, one process"])
        rows.append([f"`{path}`", *(f"{rates[n] / best:.2f}" for n in ("ours", "trl", "trl, one process"))])
    return markdown(["configuration", "ours", "TRL, a process a core", "TRL, one process"], rows)


def ours(path: Path, args: argparse.Namespace, seed: int) -> list[float]:
    """Response tokens per second of each counted step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megatron_fspo", "train", "--config", str(path)]
        command += ["--nproc", str(args.nproc), "--run.folder", folder, "--run.name", "run"]
        command += f"--run.seed {seed} --run.steps {args.steps} --optimizer.lr {LEARNING_RATE}".split()
        command += "--evaluation.every 0 --checkpoint.every 0".split()
        _run([*command, *"--parallel.tensor 1 --parallel.sequence false".split()])
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        config = load_config(path, [])
        responses = config.rollout.prompts * config.rollout.samples
        rows = [row for row in map(json.loads, lines) if "timing_s/step" in row]
        return [row["response_length/mean"] * responses / row["timing_s/step"] for row in rows[SKIPPED:]]


def theirs(path: Path, args: argparse.Namespace, processes: int, seed: int) -> list[float]:
    """The same of GRPOTrainer."""
    config = load_config(path, [])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job(config, args, processes, seed)))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        _run([str(args.trl), *launch, str(WORKER), str(file)])
        parts = [json.loads(part.read_text()) for part in sorted(Path(folder).glob("job.*.json"))]
        tokens = [sum(step) for step in zip(*(part["tokens"] for part in parts), strict=True)]
        rates = [n / s for n, s in zip(tokens, parts[0]["seconds"], strict=False)]
        return rates[SKIPPED:]


def job(config: Config, args: argparse.Namespace, processes: int, seed: int) -> Mapping[str, Any]:
    """What the worker is told: sizes of the configuration, and its prompts."""
    tokenizer = load_tokenizer(config.model.checkpoint)
    prompts = [prompt for one in load_sets(config.data, "train", tokenizer) for prompt in one.prompts]
    return {
        "model": str(config.model.checkpoint),
        "rows": [{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts],
        "prompts": config.rollout.prompts,
        "samples": config.rollout.samples,
        "max_response_tokens": config.rollout.max_response_tokens,
        "mini_batches": config.batch.mini_batches,
        "epochs": config.batch.epochs,
        "lr": LEARNING_RATE,
        "steps": args.steps,
        "threads": args.nproc // processes,
        "seed": seed,
    }


def _run(command: list[str]) -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    env = environment(OMP_NUM_THREADS=threads, HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
