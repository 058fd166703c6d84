"""Length fairness of FSPO, RLOO and GSPO at a matched clip rate, through the real trainer (`make bench`).

1. A pilot run (FSPO with the fixed c of the demo, seed 0) gives off-policy S (nats) and L (tokens). Each
   method gets the width that leaves the same share of them out of band, so that only the scaling differs:
   |S| > width·L^a with a = 1/2 for FSPO, 0 for RLOO, 1 for GSPO.
2. For each seed and method a short run; no dual clip, no warm-up. Its clip rate and LRE are those of all its
   off-policy records together, out of band: on either side, whatever the sign of the advantage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import tomli_w
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from machine import ROOT, cpu
from megatron_fspo.objective import length_reweighting_error
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.report.history import Array, History, Records, Series, read_records

DEMO = tomllib.loads((ROOT / "examples/make_sum/run.toml").read_text(encoding="utf-8"))
EXPONENTS = {"fspo": 0.5, "rloo": 0.0, "gspo": 1.0}
LOOKS = {"fspo": ("#0072b2", "o"), "rloo": ("#d55e00", "s"), "gspo": ("#009e73", "v")}  # Okabe and Ito's
FIGURES = ("clip_rate", "lre_mean", "lre_max", "null_mean", "reward_first", "reward_last")
COMPARED = "FSPO/RLOO {over_rloo:.2f}, FSPO/GSPO {over_gspo:.2f}; below both in {below_both} of {seeds} seeds"
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5%, 1 to 9 degrees


def matched_losses(pilot: Records, clip_rate: float) -> dict[str, dict[str, Any]]:
    """The ``loss`` section of each method whose band leaves this share of the pilot's records outside."""
    widths = {
        method: float(np.quantile(np.abs(pilot.log_ratio_sum) / pilot.length**exponent, 1 - clip_rate))
        for method, exponent in EXPONENTS.items()
    }
    # For RLOO and GSPO: 1 - eps_low = exp(-width), 1 + eps_high = exp(width).
    eps = {name: {"eps_low": -math.expm1(-w), "eps_high": math.expm1(w)} for name, w in widths.items()}
    c = {"c_low": widths["fspo"], "c_high": widths["fspo"], "dual_clip": "off"}
    return {name: {"name": name} | (c if name == "fspo" else eps[name]) for name in widths}


def fairness(records: Records) -> dict[str, float]:
    """Out-of-band rate, LRE over 8 length quantiles, and what chance alone gives."""
    accepted, lengths = torch.from_numpy(~records.out_of_band), torch.from_numpy(records.length)
    lre = length_reweighting_error(accepted, lengths, bootstrap=0)
    errors = {"lre_mean": lre.mean, "lre_max": lre.max, "null_mean": lre.null_mean}
    return {"clip_rate": 1 - lre.accepted_rate} | errors


def rates_by_length(runs: Sequence[Records]) -> tuple[list[float], list[list[float]]]:
    """Mean length of 8 length bins common to all runs, and each run's out-of-band rates in them."""
    lengths = torch.cat([torch.from_numpy(run.length) for run in runs])
    bins = length_bins(lengths, 8).numpy()

    def mean(part: Array, values: Any) -> list[float]:
        return (np.bincount(part, weights=values) / np.bincount(part)).tolist()

    parts = np.split(bins, np.cumsum([len(run) for run in runs])[:-1])
    return mean(bins, lengths), [mean(p, run.out_of_band) for p, run in zip(parts, runs, strict=True)]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of 2 to 10 values, and the half-width of its 95% Student t interval."""
    return fmean(values), T_QUANTILES[len(values) - 2] * stdev(values) / math.sqrt(len(values))


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """(mean, half-width) of every figure; FSPO's LRE over the others'; in how many seeds it is below both."""
    by_method = {method: [run for run in runs if run["method"] == method] for method in EXPONENTS}
    summary: dict[str, Any] = {}
    for method, mine in by_method.items():
        summary[method] = {key: mean_interval([run[key] for run in mine]) for key in FIGURES}
        by_length = np.transpose([run["clip_rate_by_length"] for run in mine]).tolist()
        summary[method]["clip_rate_by_length"] = [mean_interval(rates) for rates in by_length]
    for key in ("lre_mean", "lre_max"):
        fspo, rloo, gspo = ([run[key] for run in mine] for mine in by_method.values())
        below = sum(f < min(others) for f, *others in zip(fspo, rloo, gspo, strict=True))
        ratios = {"over_rloo": fmean(fspo) / fmean(rloo), "over_gspo": fmean(fspo) / fmean(gspo)}
        summary[f"fspo/{key}"] = ratios | {"below_both": below}
    return summary


def train(folder: Path, name: str, seed: int, steps: int, loss: Mapping[str, Any]) -> tuple[Records, Series]:
    """Run the demo with another loss on one process; returns its records and rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"name": name, "folder": str(folder), "seed": seed, "steps": steps}
    tree = DEMO | {"run": run, "loss": loss, "log": {"sequences": 1_000_000}}
    tree |= {"parallel": {}, "evaluation": {"every": 0}, "checkpoint": {"every": 0}}
    tree |= {"optimizer": DEMO["optimizer"] | {"warmup_steps": 0}}
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(tree), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_fspo", "train", "--config", str(config)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{shlex.join(command)} failed, exit status {done.returncode}")
    return read_records(folder / name), History(folder / name).series("critic/rewards/mean")


def measure(folder: Path, seeds: Sequence[int], steps: int, clip_rate: float) -> dict[str, Any]:
    """The pilot and all runs, one after the other."""
    began, total = time.monotonic(), 1 + len(seeds) * len(EXPONENTS)
    pilot, _ = train(folder, "pilot", 0, steps, DEMO["loss"] | {"calibrate": 0, "dual_clip": "off"})
    losses, records, runs = matched_losses(pilot, clip_rate), [], []
    for seed, method in [(seed, method) for seed in seeds for method in EXPONENTS]:
        elapsed, done = time.monotonic() - began, 1 + len(runs)
        progress = f"[{done}/{total}] {elapsed:.0f} s, {elapsed / done * (total - done):.0f} s left"
        print(f"{progress}; {method}, seed {seed}", flush=True)
        kept, rewards = train(folder, f"{method}-{seed}", seed, steps, losses[method])
        figures = fairness(kept) | {"reward_first": rewards.first(1), "reward_last": rewards.last(1)}
        records.append(kept)
        runs.append({"method": method, "seed": seed, "records": len(kept)} | figures)
    lengths, rates = rates_by_length(records)
    runs = [run | {"clip_rate_by_length": rate} for run, rate in zip(runs, rates, strict=True)]
    result = {"seconds": round(time.monotonic() - began), "losses": losses, "lengths": lengths}
    return result | {"summary": summarize(runs), "runs": runs}


def table(summary: Mapping[str, Any], seeds: int) -> str:
    """The summary as Markdown."""
    lines = [f"| method | {' | '.join(FIGURES)} |", "|---" * (1 + len(FIGURES)) + "|"]
    for method in EXPONENTS:
        cells = ["{:.3f} ± {:.3f}".format(*summary[method][key]) for key in FIGURES]
        lines.append(f"| {method.upper()} | {' | '.join(cells)} |")
    for key in ("lre_mean", "lre_max"):
        lines += ["", f"{key}: " + COMPARED.format(**summary[f"fspo/{key}"], seeds=seeds)]
    return "\n".join(lines)


def draw(lengths: Sequence[float], summary: Mapping[str, Any], path: Path) -> None:
    """Out-of-band rate against response length, with its interval, for the three methods."""
    with rc_context({"svg.hashsalt": "fairness", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for method, (colour, marker) in LOOKS.items():
            rates, reach = np.array(summary[method]["clip_rate_by_length"]).T
            label = f"{method.upper()}: LRE {summary[method]['lre_mean'][0]:.3f}"
            axes.fill_between(lengths, rates - reach, rates + reach, color=colour, alpha=0.15, lw=0)
            axes.plot(lengths, rates, color=colour, marker=marker, ms=5, lw=2.2, label=label)
        overall = fmean(summary[method]["clip_rate"][0] for method in EXPONENTS)
        axes.axhline(overall, color="#6b7280", lw=0.8, label=f"all lengths: {overall:.1%}")
        axes.set(xlabel="response length (tokens)", ylabel="share outside the clip band", ylim=(0, None))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize=8.5)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Length fairness of clipping at a matched clip rate.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="2 to 10 (default 1 2 3)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run (default 8)")
    parser.add_argument("--clip-rate", type=float, default=0.1, help="share out of band (default 0.1)")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/fairness.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/fairness.svg")
    args = parser.parse_args()
    if not 2 <= len(set(args.seeds)) == len(args.seeds) <= 10 or not 0 < args.clip_rate < 1 or args.steps < 1:
        parser.error("2 to 10 different --seeds, a --clip-rate between 0 and 1, at least 1 of --steps")
    with tempfile.TemporaryDirectory() as temporary:
        result = measure((args.folder or Path(temporary)).resolve(), args.seeds, args.steps, args.clip_rate)
    command = shlex.join(["python", "benchmarks/fairness.py", *sys.argv[1:]])
    settings = {"steps": args.steps, "clip_rate": args.clip_rate, "seeds": args.seeds, "demo": DEMO}
    machine = {"cpu": cpu()} | {name: version(name) for name in ("torch", "megatron-core")}
    result = {"command": command, "machine": machine} | settings | result
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result["lengths"], result["summary"], args.plot)
    print(table(result["summary"], len(args.seeds)))
    print(f"\n{result['seconds']} s on {json.dumps(result['machine'])}\n{args.out}\n{args.plot}")


if __name__ == "__main__":
    main()
