"""How much sampling ahead saves: the same training with `rollout.max_staleness` 0 and 1, turn by turn.

    VLLM_BIN=.venv-vllm/bin/vllm python benchmarks/async_rollouts.py

Server and trainer have one core each, as they would have GPUs of their own. Seconds are those of whole steps
(sampling, training, weight update) but the first, which has nothing to overlap with.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import ROOT, environment, machine, markdown, options_of, vllm_server

CHECKPOINT = "runs/make-sum-32/checkpoint"
TRAINING = (
    "--parallel.tensor 1 --parallel.sequence false --rollout.prompts 32 --batch.epochs 1 "
    "--evaluation.every 0 --checkpoint.every 0 --log.sequences 0"
).split()


def train(folder: Path, name: str, url: str, staleness: int, steps: int, core: int) -> dict[str, float]:
    """Seconds of a step, and what of it was waiting for responses."""
    words = [sys.executable, "-m", "megatron_fspo", "train", "--config", "examples/make_sum/run_vllm.toml"]
    words += ["--nproc", "1", "--run.folder", str(folder), "--run.name", name, "--run.steps", str(steps)]
    words += ["--vllm.urls", f"['{url}']", "--rollout.max-staleness", str(staleness), *TRAINING]
    subprocess.run(
        words, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL, preexec_fn=on_core(core)
    )
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 1]
    oldest = max(row["rollout/staleness/max"] for row in rows)
    if oldest > staleness:
        sys.exit(f"a response {oldest} versions old where {staleness} are allowed")
    return {
        "seconds": fmean(row["timing_s/step"] for row in rows),
        "waiting": fmean(row["timing_s/gen"] for row in rows),
        "staleness": fmean(row["rollout/staleness/mean"] for row in rows),
    }


def on_core(core: int) -> Callable[[], None]:
    """Runs in the child before it starts."""
    return lambda: os.sched_setaffinity(0, {core})


def table(report: Mapping[str, Any]) -> str:
    """Markdown: times as multiples of a synchronous step."""
    rows, step = [], report["sync"]["seconds"]
    for name, key in (("synchronous", "sync"), ("one step ahead", "async")):
        times = [f"{report[key][what] / step:.2f}" for what in ("seconds", "waiting")]
        rows.append([name, *times, f"{report[key]['staleness']:.2g}"])
    return markdown(["", "a step", "of it waiting for responses", "staleness, mean over tokens"], rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each run, 2 or more (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8190, help="of the server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/async_rollouts.json")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if options.steps < 2 or options.turns < 1:
        parser.error("at least 2 steps, of which the first is left out, and 1 turn")
    if len(cores) < 2:
        sys.exit("needs two cores")
    if not (ROOT / CHECKPOINT).exists():
        sys.exit(f"no {CHECKPOINT}: `make {CHECKPOINT}/config.json` makes it")
    runs: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one_core = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with vllm_server(
            CHECKPOINT, options.port, folder / "vllm.log", in_child=on_core(cores[0]), **one_core
        ) as url:
            for turn in range(options.turns):
                for staleness, kind in enumerate(runs):
                    run = train(folder, f"{kind}-{turn}", url, staleness, options.steps, cores[1])
                    runs[kind].append(run)
                    print(f"{kind:6} {run['seconds']:.2f} s a step, {run['waiting']:.2f} s of it waiting")
    means = {kind: {key: fmean(run[key] for run in some) for key in some[0]} for kind, some in runs.items()}
    ratio = means["sync"]["seconds"] / means["async"]["seconds"]
    report = {
        "command": shlex.join(["python", "benchmarks/async_rollouts.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        **machine(),
        "steps": options.steps,
        "runs": runs,
        "sync": means["sync"],
        "async": means["async"],
        "steps_ratio": ratio,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    print(f"\nasync finishes {ratio:.2f} times the steps of sync in the same time")


if __name__ == "__main__":
    main()
