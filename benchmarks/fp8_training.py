"""FSPO in FP8 beside bfloat16: make-sum on two ranks (TP2 with SP), resumed once, its export compared.

    .venv-te/bin/python benchmarks/fp8_training.py

Transformer Engine's modules on the CPU, kernels replaced (tests/te/fake): what FP8 does to learning, and
nothing of its speed. `make test-te` makes the environment. Minutes for each run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from machine import ROOT, environment, machine, markdown, options_of

RECIPES = ("none", "blockwise", "tensorwise")
CLOCK = ("timing_s/", "perf/")
VALIDATION = "val/validation/mean@64"
MASTER = "optimizer.state.fp32_param."
LAST = 3
"""Steps at the end whose rewards are averaged."""


def train(folder: Path, name: str, recipe: str, seed: int, steps: int, *more: str) -> list[dict[str, Any]]:
    """The logged rows of a run."""
    words = [sys.executable, "-W", "ignore", "-m", "megatron_fspo", "train", "--nproc", "2"]
    words += ["--config", "examples/make_sum/run.toml", "--run.folder", str(folder), "--run.name", name]
    words += ["--run.steps", str(steps), "--run.seed", str(seed), "--fp8.recipe", recipe]
    words += f"--model.dtype bfloat16 --evaluation.every {steps} --checkpoint.every {steps // 2}".split()
    env = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "tests/te/fake")
    done = subprocess.run([*words, *more], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def resumed_alike(folder: Path, name: str, rows: list[dict[str, Any]], *run: Any) -> bool:
    """Whether the second half, from the checkpoint in the middle, gives the same rows and weights."""
    weights = folder / name / "hf/model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(sorted((folder / name / "checkpoints").iterdir())[-1])
    again = train(folder, name, *run, "--resume")
    without_clock = [
        [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in some]
        for some in (rows, again)
    ]
    return without_clock[0] == without_clock[1] and weights.read_bytes() == before


def exports_masters(run: Path) -> bool:
    """Whether exported weights are, bit for bit, the bfloat16 cast of the fp32 masters."""
    from megatron_fspo.weights import MegatronReader, expected_hf_shapes, read_architecture
    from megatron_fspo.weights.chunks import ChunkReader
    from megatron_fspo.weights.hf_reader import HFReader
    from megatron_fspo.weights.safe_pickle import read_metadata

    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    arch = read_architecture(run / "hf")
    mine, exported, stored = (
        MegatronReader(checkpoint, arch),
        HFReader(run / "hf"),
        ChunkReader(checkpoint / "torch_dist"),
    )
    names = expected_hf_shapes(arch)
    same = all(torch.equal(mine.read(name).float(), exported.read(name).float()) for name in names)
    masters = [key for key in read_metadata(stored.folder).state_dict_metadata if key.startswith(MASTER)]
    for key in masters:
        whole = ((0,) * len(stored.shape(key)), stored.shape(key))
        master, weight = torch.empty(whole[1]), torch.empty(whole[1], dtype=torch.bfloat16)
        stored.read_into(key, [(whole, master)])
        stored.read_into(key.removeprefix(MASTER), [(whole, weight)])
        same &= torch.equal(weight, master.bfloat16())
    return same and bool(masters)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one run."""
    steps = [row for row in rows if row["step"]]

    def mean(key: str, some: list[dict[str, Any]] = steps) -> float:
        return statistics.fmean(row[key] for row in some)

    return {
        "rewards": [row["critic/rewards/mean"] for row in steps],
        "reward_at_the_end": mean("critic/rewards/mean", steps[-LAST:]),
        "validation": [row[VALIDATION] for row in rows if VALIDATION in row],
        "abs_s_before_first_updates": max(row["fspo/on_policy_abs_s_max"] or 0.0 for row in steps),
        "abs_delta_to_bf16_sampler": mean("rollout/logprob_abs_diff/mean"),
        "mismatch_sigma": mean("rollout/mismatch_sigma"),
        "sigma_hat": mean("fspo/sigma_hat"),
        "clipped": mean("actor/pg_clipfrac"),
    }


def table(runs: dict[str, list[dict[str, Any]]], steps: int) -> str:
    """Markdown: means over seeds, and their range."""

    def cell(recipe: str, pick: Any) -> str:
        values = [pick(run) for run in runs[recipe]]
        return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    lines = {
        "reward, first step": lambda run: run["rewards"][0],
        f"reward, last {LAST} of {steps} steps": lambda run: run["reward_at_the_end"],
        "validation before": lambda run: run["validation"][0],
        "validation after": lambda run: run["validation"][-1],
        "σ̂ of S/√L after updates": lambda run: run["sigma_hat"],
        "clipped": lambda run: run["clipped"],
        "mean abs Δ to the bf16 sampler": lambda run: run["abs_delta_to_bf16_sampler"],
        "rollout/mismatch_sigma": lambda run: run["mismatch_sigma"],
    }
    rows = [[name, *(cell(recipe, pick) for recipe in runs)] for name, pick in lines.items()]
    for name, key in (
        ("largest abs S before any first update", "abs_s_before_first_updates"),
        ("resumed to the bit", "resumed"),
        ("export is the masters' cast", "exported"),
    ):
        # The second half is run again for the first seed with FP8 only.
        values = [{str(run[key]) for run in runs[recipe] if key in run} for recipe in runs]
        rows.append([name, *(", ".join(sorted(some)) for some in values)])
    return markdown(["", *runs], rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs with each recipe (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/fp8_training.json")
    options = parser.parse_args()
    if importlib.util.find_spec("transformer_engine") is None:
        sys.exit("there is no Transformer Engine here: `make test-te` installs it in .venv-te")
    runs: dict[str, list[dict[str, Any]]] = {recipe: [] for recipe in RECIPES}
    report: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/fp8_training.py", *sys.argv[1:]]),
        "what": "Transformer Engine's modules on the CPU, kernels replaced",
        "date": time.strftime("%Y-%m-%d"),
        **machine(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(1, options.seeds + 1):
            for recipe in RECIPES:
                run, what = f"{recipe}-{seed}", (recipe, seed, options.steps)
                rows = train(folder, run, *what)
                runs[recipe].append(summary(rows) | {"exported": exports_masters(folder / run)})
                if seed == 1 and recipe != "none":
                    runs[recipe][-1]["resumed"] = resumed_alike(folder, run, rows, *what)
                print(run, json.dumps(runs[recipe][-1]), flush=True)
            # What a run of hours has found so far is not lost.
            report |= {"seeds": seed, "table": table(runs, options.steps).splitlines(), "runs": runs}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(report["table"]))


if __name__ == "__main__":
    main()
