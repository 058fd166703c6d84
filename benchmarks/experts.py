"""A mixture of experts learns make-sum: replay off, of the old pass, of the sampler; and the dense model.

    VLLM_BIN=.venv-vllm/bin/vllm python benchmarks/experts.py [--seeds 1 2 3] [--steps 12]

Every run is `megatron-fspo train` over two CPU processes in float32, from the same warm start: the mixture
has four experts in each layer, two for a token, made of the dense MLP and some noise. Responses come from the
training model (embedded) or from one real vLLM server in bfloat16, which is what a sampler differs by.
Figures are means over the steps of a run, and medians over seeds.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from machine import ROOT, environment, machine, markdown, options_of, vllm_server

WARM_START = "runs/make-sum-32/checkpoint"
METRICS = {
    "difference": "rollout/logprob_abs_diff/mean",
    "sigma": "rollout/mismatch_sigma",
    "sampler_flips": "rollout/route_flips",
    "update_flips": "actor/route_flips",
    "clipped": "actor/pg_clipfrac",
    "load_max": "router/load_max",
}
ACCURACY = "val/validation/mean@16"
SHARED = "--evaluation.samples 16 --rollout.prompts 32 --rollout.samples 16 --parallel.tensor 1"
SHARED += " --parallel.sequence false --loss.calibrate 0 --loss.c-low 0.1 --loss.c-high 0.1"
SHARED += " --optimizer.warmup-steps 4 --checkpoint.every 0 --log.sequences 0"
SERVER = "--routes --dtype bfloat16".split()
OF_SERVER = "--rollout.engine vllm --vllm.canary-tolerance 4 --rollout.mismatch-limit 0.1"
KINDS = {
    "dense, embedded": "dense",
    "experts, embedded, off": "experts --moe.replay off",
    "experts, embedded, old_pass": "experts --moe.replay old_pass",
    "experts, vLLM, off": "experts --moe.replay off",
    "experts, vLLM, old_pass": "experts --moe.replay old_pass",
    "experts, vLLM, rollout": "experts --moe.replay rollout",
}


def train(folder: Path, name: str, words: list[str]) -> dict[str, float]:
    """One run: accuracy before and after, and means of metrics over its steps."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29641",
    ]
    command += ["-m", "megatron_fspo", "train", "--config", str(ROOT / "examples/make_sum/run.toml")]
    command += ["--run.folder", str(folder), "--run.name", name, *words]
    log = folder / f"{name}.txt"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=file, stderr=file)
    if done.returncode:
        sys.exit(f"{name}: exit status {done.returncode}\n{log.read_text()[-8000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row[ACCURACY] for row in rows if row.get(ACCURACY) is not None]
    result = {"before": accuracy[0], "after": accuracy[-1]}
    for key, metric in METRICS.items():
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if values:
            result[key] = fmean(values)
    return result


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """As docs/parallelism.md has it."""
    rows = []
    for kind, some in runs.items():
        gains = " / ".join(f"{one['before']:.3f} → {one['after']:.3f}" for one in some)
        cells = [kind, gains]
        for key, form in (("difference", ".1e"), ("sampler_flips", ".2%"), ("update_flips", ".2%")):
            known = [one[key] for one in some if key in one]
            cells.append(format(median(known), form) if known else "–")
        rows.append(cells)
    head = ["run", "accuracy before → after, by seed", "mean sampler–trainer difference, nats"]
    return markdown([*head, "flips, sampler to old pass", "flips, old pass to update"], rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of each run (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8193, help="of the server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/experts.json")
    options = parser.parse_args()
    if not (ROOT / WARM_START).exists():
        sys.exit(f"no {WARM_START}: `make {WARM_START}/config.json` makes it")
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experts = folder / "experts"
        runpy.run_path(str(ROOT / "examples/make_sum/make_experts.py"))["main"](experts, ROOT / WARM_START)
        checkpoints = {"dense": ROOT / WARM_START, "experts": experts}
        one_core = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with vllm_server(str(experts), options.port, folder / "vllm.log", *SERVER, **one_core) as url:
            for seed in options.seeds:
                for kind, text in KINDS.items():
                    model, *words = text.split()
                    words += ["--model.checkpoint", str(checkpoints[model]), "--run.seed", str(seed)]
                    words += ["--run.steps", str(options.steps), "--evaluation.every", str(options.steps)]
                    if model == "experts":
                        words += ["--parallel.expert", "2"]
                    if "vLLM" in kind:
                        words += [*OF_SERVER.split(), "--vllm.urls", json.dumps([url])]
                    run = train(folder, f"{kind}-{seed}".replace(", ", "-"), [*SHARED.split(), *words])
                    runs[kind].append(run)
                    print(kind, seed, json.dumps(run), flush=True)
    report = {
        "command": shlex.join(["python", "benchmarks/experts.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        **machine(),
        "ranks": 2,
        "steps": options.steps,
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
