"""What a step takes but for the model, before and after: commit aef6116 held every sample on every rank, as
Python's numbers, sent as pickles.

    python benchmarks/step_overhead.py

Both run the trainer's own functions on gloo ranks: answers of vLLM servers are read, shared, graded, planned,
packed, compared with the (made up) log-probs of the trainer, corrected and recorded, for two optimizer steps.
Text decoding and the reward do nothing. Needs the older commit in the clone's history.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, environment, machine

SIZES = ((256, 8192), (512, 16384))
"""Responses and the tokens of the longest."""
FULL = (8192, 16384)
PLANS = (1024, 2048, 4096, 8192)
LAYOUTS = {"dp4": (1, 1), "cp2 dp2": (1, 2)}
"""Tensor and context parallel size; the rest of the ranks are data parallel."""
RANKS = 4
PHASES = {
    "share": "share: from the first rank to the others",
    "exchange": "exchange: to the rank that trains on it",
    "grade": "grades, advantages, columns",
    "plan": "plan",
    "collate": "collate",
    "mismatch": "mismatch, alarm, correction",
    "records": "records, clip metrics",
}
MEASURES = {
    "cpu_seconds_busiest_rank": "CPU seconds of the busiest rank",
    "cpu_seconds_all_ranks": "CPU seconds of all ranks",
    "wall_seconds": "seconds",
    "memory_first_rank": "first rank: peak bytes per token",
    "memory_other_ranks": "another rank: peak bytes per token",
    "received_all_ranks": "sent between ranks, bytes per token",
}


def measure(tree: Path, code: str, folder: Path, *arguments: object) -> dict[str, Any]:
    """What ``step_rank.py`` finds on its ranks with the package of a tree."""
    out = folder / "found.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launch, "benchmarks/step_rank.py", "--code", code, "--package", tree, "--out", out]
    _run([*command, *arguments], tree)
    found = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def _run(arguments: list[object], tree: Path) -> str:
    paths = f"{tree}:{ROOT / 'benchmarks'}"
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def steps(trees: dict[str, Path], folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Every layout and size, before and after; both must come to the same metrics."""
    found = []
    for layout, (tensor, context) in LAYOUTS.items():
        for responses, tokens in SIZES:
            about = {"layout": layout, "responses": responses, "tokens": tokens}
            arguments = ["--responses", responses, "--tokens", tokens, "--repeats", repeats]
            arguments += ["--tensor", tensor, "--context", context]
            pair = {code: measure(tree, code, folder, *arguments) for code, tree in trees.items()}
            before, after = (pair[code].pop("metrics") for code in ("before", "after"))
            for name in before.keys() & after.keys():
                # Times apart; and fits of S, whose made-up values go by the order of a pack.
                if name.startswith(("rollout/", "response_length", "critic/")):
                    assert math.isclose(before[name], after[name], rel_tol=1e-5, abs_tol=1e-9), name
            found.append(about | pair)
            print(json.dumps(found[-1]), flush=True)
    return found


def plans(trees: dict[str, Path], folder: Path, most: float) -> list[dict[str, Any]]:
    """Seconds to plan a step of so many responses; None once the size before took ``most``."""
    found: list[dict[str, Any]] = []
    for responses in PLANS:
        row: dict[str, Any] = {"responses": responses}
        for code, tree in trees.items():
            if found and (found[-1][code] is None or found[-1][code] > most):
                row[code] = None
                continue
            out = folder / "plan.json"
            _run(["benchmarks/step_rank.py", "--plan", "--code", code, "--package", tree, "--out", out,
                  "--responses", responses, "--tokens", FULL[1]], tree)  # fmt: skip
            found_here = json.loads(out.read_text(encoding="utf-8"))
            row[code], row["response_tokens"] = found_here["seconds"], found_here["response_tokens"]
        found.append(row)
    return found


def saves(trees: dict[str, Path]) -> dict[str, Any]:
    """A checkpoint of 135M parameters on two ranks: seconds, and bytes per parameter of the fullest rank."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    for code, tree in trees.items():
        said = _run(
            [*launch, "benchmarks/checkpoint_memory.py", "--distributed-optimizer", "--package", tree], tree
        )
        ranks = re.findall(r"([\d.]+) more during the save; ([\d.]+) s", said)
        found[code] = {
            "bytes_per_parameter": max(float(more) for more, _ in ranks),
            "seconds": max(float(seconds) for _, seconds in ranks),
        }
    return found


def per_token(run: dict[str, Any], code: str, name: str) -> float:
    """Seconds or bytes over response tokens."""
    return run[code][name] / run[code]["response_tokens"]


def summary(report: dict[str, Any]) -> str:
    """As in docs/performance.md: the ratio before : after, and the size of it."""
    sizes = [f"{responses} x {tokens // 1024}k" for responses, tokens in SIZES]
    head = [f"{layout}, {size}" for layout in LAYOUTS for size in sizes]
    lines = ["| before → after | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    for name, text in MEASURES.items():
        cells = []
        for run in report["steps"]:
            pair = [run[code][name] for code in ("before", "after")]
            shown = [
                _shown(per_token(run, code, name), run[code][name], name) for code in ("before", "after")
            ]
            cells.append(f"{shown[0]} → {shown[1]} ({pair[0] / pair[1]:.1f}×)")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(each: float, whole: float, name: str) -> str:
    return f"{whole:.2f}" if "seconds" in name else f"{each:.0f}"


def phases(report: dict[str, Any]) -> str:
    """As in docs/performance.md: nanoseconds per response token of the step, on the busiest rank."""
    runs = [run for run in report["steps"] if run["layout"] == "dp4"]
    sizes = [f"{run['responses']} x {run['tokens'] // 1024}k" for run in runs]
    lines = ["| ns per token | " + " | ".join(sizes) + " |", "|---|" + "---|" * len(runs)]
    for name, text in {**PHASES, "read": "read the answers (not in the sums)"}.items():
        cells = []
        for run in runs:
            pair = [1e9 * run[c]["phases"][name] / run[c]["response_tokens"] for c in ("before", "after")]
            cells.append(f"{pair[0]:.0f} → {pair[1]:.0f}")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def full_size(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Extrapolated to the step of ``FULL``: in proportion to tokens, but for the plan, which is measured."""
    run = next(run for run in reversed(report["steps"]) if run["layout"] == "dp4")
    last = report["plan"][-1]
    found = {}
    for code in ("before", "after"):
        work = run[code]["cpu_seconds_busiest_rank"] - run[code]["phases"]["plan"]
        tokens = last["response_tokens"]
        found[code] = {
            "seconds": work / run[code]["response_tokens"] * tokens + (last[code] or math.nan),
            "first_rank_gib": per_token(run, code, "memory_first_rank") * tokens / 2**30,
            "other_rank_gib": per_token(run, code, "memory_other_ranks") * tokens / 2**30,
        }
    return found


def at_full_size(report: dict[str, Any]) -> str:
    """As in docs/performance.md."""
    found = full_size(report)
    rows = {
        "seconds": "CPU seconds of the busiest of 4 ranks",
        "first_rank_gib": "first rank, GiB",
        "other_rank_gib": "another rank, GiB",
    }
    lines = ["| 8,192 x 16k, extrapolated | before | after |", "|---|---|---|"]
    for name, text in rows.items():
        lines.append(f"| {text} | {found['before'][name]:.1f} | {found['after'][name]:.1f} |")
    last = report["plan"][-1]
    lines.append(f"| of it the plan, measured: seconds | {last['before']:.2f} | {last['after']:.2f} |")
    return "\n".join(lines)


def of_saves(report: dict[str, Any]) -> str:
    """As in docs/performance.md."""
    before, after = (report["checkpoint"][code] for code in ("before", "after"))
    return (
        f"{before['bytes_per_parameter']:.1f} → {after['bytes_per_parameter']:.1f} bytes per parameter and "
        f"{before['seconds']:.0f} → {after['seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", default="aef6116", help="the commit to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="of which the fastest counts")
    parser.add_argument(
        "--most", type=float, default=60.0, help="seconds; no larger plan after one that took more"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/step_overhead.json")
    options = parser.parse_args()
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: no such folder")
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "before"
        tree.mkdir()
        archive = subprocess.run(
            ["git", "archive", options.before], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", str(tree)], input=archive.stdout, check=True)
        trees = {"before": tree, "after": ROOT}
        report = {
            "command": "python benchmarks/step_overhead.py",
            **machine(),
            "before": options.before,
            "ranks": RANKS,
            "steps": steps(trees, Path(name), options.repeats),
            "plan": plans(trees, Path(name), options.most),
            "checkpoint": saves(trees),
        }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(summary(report), phases(report), json.dumps(full_size(report), indent=1), sep="\n\n")


if __name__ == "__main__":
    main()
