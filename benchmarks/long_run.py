"""CPU time and memory of resume, status and report after very many steps, with the rows of a short run.

    make demo DEMO_ARGS="--run.steps 4"
    python benchmarks/long_run.py runs/demo

The rows of the short run are repeated; CPU time is what other work on the machine disturbs least.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, cpu, environment, markdown, options_of
from megatron_fspo.record.rows import METRICS, SEQUENCES, read_rows

RECORDS = 1024
"""Sequences of a step, as ``log.sequences`` keeps them by default."""
RESUME = """
from pathlib import Path
from megatron_fspo.config.loading import load_config
from megatron_fspo.record.log import RunLog
config = load_config(Path({folder!r}, "config.toml"), ["--run.steps", "{steps}"])
RunLog(config, writer=True, resume_step={steps})
"""
MEASURED = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, status)
"""


def main() -> None:
    """Print a table; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 50_000])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/long_run.json")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": cpu(), "records": RECORDS, "runs": {}}
    for steps in args.steps:
        with tempfile.TemporaryDirectory() as folder:
            bytes_written = lengthen(args.run, Path(folder, "run"), steps)
            found["runs"][str(steps)] = {"bytes": bytes_written, **measure(Path(folder, "run"), steps)}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


def lengthen(run: Path, into: Path, steps: int) -> int:
    """A folder as of a run of so many steps; returns the bytes of its records."""
    into.mkdir()
    shutil.copy(run / "config.toml", into)
    for name in (METRICS, SEQUENCES):
        rows = [row for row in read_rows(run / name) if row["step"] > 0]
        ends = [json.dumps(_full(row)).partition(",")[2] for row in rows]
        with (into / name).open("w", encoding="utf-8") as file:
            for step, end in zip(range(1, steps + 1), itertools.cycle(ends)):
                file.write(f'{{"step": {step},{end}\n')
    return (into / SEQUENCES).stat().st_size


def _full(row: dict[str, Any]) -> dict[str, Any]:
    def value(one: Any) -> Any:
        return list(itertools.islice(itertools.cycle(one), RECORDS)) if isinstance(one, list) else one

    return {name: value(one) for name, one in row.items()}


def measure(folder: Path, steps: int) -> dict[str, dict[str, float]]:
    """CPU seconds and MiB, each in a process of its own."""
    words = [sys.executable, "-m", "megatron_fspo"]
    commands = {
        "resume": [sys.executable, "-c", RESUME.format(folder=str(folder), steps=steps)],
        "status": [*words, "status", str(folder)],
        "report": [*words, "report", str(folder)],
        "imports": [sys.executable, "-c", "import megatron_fspo.record.log"],
    }
    found = {}
    for name, command in commands.items():
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *command],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        seconds, mib, status = map(float, done.stdout.split())
        if status:
            raise SystemExit(f"{name} ended with {status:.0f}: {done.stderr}")
        found[name] = {"seconds": seconds, "mib": mib}
    return found


def table(found: dict[str, Any]) -> str:
    """Rows for docs/running.md."""
    names = ("imports", "resume", "status", "report")
    rows = []
    for steps, run in found["runs"].items():
        cells = [f"{run[name]['seconds']:.1f} s, {run[name]['mib']:.0f} MiB" for name in names]
        rows.append([f"{int(steps):,}", f"{run['bytes'] / 2**30:.2f} GiB", *cells])
    return markdown(["steps", "sequences.jsonl", *names], rows)


if __name__ == "__main__":
    main()
