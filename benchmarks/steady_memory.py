"""Does the memory of a long run grow? Resident memory of the trainer's processes, a sample each second.

    make runs/smollm2/checkpoint/config.json
    python benchmarks/steady_memory.py --hours 2                  # SmolLM2, responses of up to 1,024 tokens

The run is stopped after so many hours. Its first quarter is left out: memory is touched for the first time
there. Growth is the largest of the last quarter over that of the second.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from long_responses import FORMS, write_prompts
from machine import ROOT, cpu, environment, markdown, options_of
from megatron_fspo.record.rows import METRICS, read_rows

QUARTERS = 4


def main() -> None:
    """Print a table of the quarters; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "benchmarks/long.toml")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--nproc", type=int, default=1, help="processes, a thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/steady_memory.json")
    args = parser.parse_args()
    if args.hours <= 0 or args.nproc < 1:
        parser.error("--hours and --nproc: above 0")
    write_prompts(ROOT / "runs/evidence/long_stories.jsonl", FORMS[-1:])
    with tempfile.TemporaryDirectory() as folder:
        samples = resident(command(args.config, args.nproc, folder), args.hours * 3600)
        rows = [row for row in read_rows(Path(folder, "run", METRICS)) if "response_length/max" in row]
    if not rows:
        raise SystemExit(f"no step ended in {args.hours:g} hours")
    result = {
        "config": args.config.name,
        "machine": cpu(),
        "nproc": args.nproc,
        "hours": args.hours,
        "steps": len(rows),
        "longest": max(row["response_length/max"] for row in rows),
        "tokens": sum(row["response_length/mean"] for row in rows) / len(rows),
        "bytes": quarters(samples),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def command(config: Path, nproc: int, folder: str) -> list[str]:
    """Trains until it is stopped; the package of this checkout."""
    words = [sys.executable, "-m", "megatron_fspo", "train", "--config", str(config), "--nproc", str(nproc)]
    words += ["--run.folder", folder, "--run.name", "run", "--run.steps", "1000000"]
    words += ["--rollout.samples", "8", "--parallel.tensor", "1", "--parallel.sequence", "false"]
    # Next to no learning, so that lengths stay as they are.
    return [*words, "--optimizer.lr", "1e-12", "--reward.max_zero_variance_steps", "0"]


def resident(words: list[str], seconds: float) -> list[int]:
    """Bytes of the program and all that it started, one sample each second.

    Raises:
        SystemExit: it ended by itself.
    """
    variables = environment(OMP_NUM_THREADS="1")
    variables["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
    run = psutil.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
    end = time.monotonic() + seconds
    samples: list[int] = []
    while time.monotonic() < end:
        time.sleep(1)
        if run.poll() is not None:
            raise SystemExit(f"the run ended after {len(samples)} seconds: exit status {run.returncode}")
        samples.append(memory_of(run))
    run.terminate()
    run.wait()
    return samples


def memory_of(run: psutil.Process) -> int:
    """Resident bytes of a process and its children; those that have just ended count nothing."""
    total = 0
    for process in (run, *run.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def quarters(samples: list[int]) -> list[dict[str, int]]:
    """Median and largest of each quarter."""
    size = len(samples) // QUARTERS
    cut = [sorted(samples[at * size : (at + 1) * size]) for at in range(QUARTERS)]
    return [{"median": some[size // 2], "largest": some[-1]} for some in cut]


def table(result: dict[str, Any]) -> str:
    """GiB by quarter, and the growth."""
    rows = [
        [f"{at + 1}", *(f"{one[key] / 2**30:.2f}" for key in ("median", "largest"))]
        for at, one in enumerate(result["bytes"])
    ]
    growth = result["bytes"][-1]["largest"] / result["bytes"][1]["largest"] - 1
    head = f"{result['steps']} steps in {result['hours']:g} hours, {result['tokens']:.0f} tokens a response"
    return f"{markdown(['quarter', 'median GiB', 'largest GiB'], rows)}\n\n{head}; growth {growth:+.1%}"


if __name__ == "__main__":
    main()
