"""The tables of docs/real_model.md, from the runs of ``examples/smollm2/run.sh``.

    python benchmarks/real_model.py 1 2 3
    python benchmarks/real_model.py lora-1 lora-2 lora-3 --out benchmarks/results/real_model_lora.json

The arguments are what follows ``smollm2-`` in the names of the runs.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from machine import ROOT, cpu, markdown, options_of
from megatron_fspo.evaluation.results import AVERAGE
from megatron_fspo.lab.report.history import Records, clip_rates, overall_rates, pooled_lre, read_records

RUNS = ROOT / "runs"
BINS = 4


def main() -> None:
    """Print the tables; write the figures and the responses."""
    parser = options_of(__doc__)
    parser.add_argument("seeds", nargs="+", help="names of the runs; responses are those of the first")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/real_model.json")
    args = parser.parse_args()
    found = {seed: figures(seed) for seed in args.seeds}
    args.out.write_text(json.dumps({"machine": cpu(), "runs": found}, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    if all("-" in run for run in found):
        print(gains_table(found))
    print(steps_table(found))
    print(clip_table(found))
    responses = args.out.with_name(f"{args.out.stem}_responses.md")
    responses.write_text(examples(args.seeds[0]), encoding="utf-8")


def figures(seed: str) -> dict[str, Any]:
    """What a run and its two evaluations say."""
    folder = RUNS / f"smollm2-{seed}"
    before = json.loads((RUNS / "smollm2/before/results.json").read_text(encoding="utf-8"))
    after = json.loads((RUNS / f"smollm2/after-{seed}/results.json").read_text(encoding="utf-8"))
    rows = [row for row in lines_of(folder / "metrics.jsonl") if "critic/score/mean" in row]
    return {
        "config": tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")),
        "before": scores(before),
        "after": scores(after),
        "difference": scores(after["comparison"]["difference"]),
        "score": [row["critic/score/mean"] for row in rows],
        "c": [row["fspo/c_high"] for row in rows],
        "sigma_hat": [row["fspo/sigma_hat"] for row in rows if row["fspo/sigma_hat"] is not None],
        "length": [row["response_length/mean"] for row in rows],
        "records": clipping(read_records(folder)),
    }


def scores(results: dict[str, Any]) -> dict[str, Any]:
    """Of every set, and their average."""
    return {**results["sets"], AVERAGE: results[AVERAGE]}


def clipping(records: Records) -> dict[str, Any]:
    """Shares outside the band over length, of all off-policy records of a run."""
    lre = pooled_lre(records)
    bins = [
        {"low": one.low, "high": one.high, "out_of_band": one.out_of_band}
        for one in clip_rates(records, num_bins=BINS)
    ]
    return {
        "count": len(records),
        "out_of_band": overall_rates(records).out_of_band,
        "clipped": overall_rates(records).clipped,
        "lre": {"value": lre.mean, "low": lre.mean_interval[0], "high": lre.mean_interval[1]},
        "lre by chance": lre.null_mean,
        "by length": bins,
    }


def lines_of(path: Path) -> list[Any]:
    """JSON objects, one a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def interval(value: dict[str, float], sign: str = "") -> str:
    """``12.3 [10.0, 14.1]``, × 100."""
    middle, low, high = (100 * value[name] for name in ("value", "low", "high"))
    return f"{middle:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def table(found: dict[str, Any]) -> str:
    """Before, which all runs have in common, and after every run: over all sets, and the values of each."""
    first = next(iter(found.values()))["before"]
    sets = [name for name in first if name != AVERAGE]
    assert all(one["before"] == first for one in found.values())
    rows = []
    for run, one in {"before": {"after": first}, **found}.items():
        after, gain = one["after"], one.get("difference")
        rows.append(
            [
                run,
                interval(after[AVERAGE]["mean"]),
                "" if gain is None else f"**{interval(gain[AVERAGE]['mean'], '+')}**",
                *(f"{100 * after[name]['mean']['value']:.1f}" for name in sets),
                f"{after[AVERAGE]['length']['value']:.1f}",
                f"{100 * after[AVERAGE]['truncated']['value']:.0f}%",
            ]
        )
    return markdown(["seed", "accuracy", "paired difference", *sets, "tokens", "truncated"], rows)


def gains_table(found: dict[str, Any]) -> str:
    """Gains × 100 of runs that are called by arm and seed, such as ``lora-1``."""
    arms: dict[str, list[str]] = {}
    for run, one in found.items():
        gain = one["difference"][AVERAGE]["mean"]["value"]
        arms.setdefault(f"`{run.rpartition('-')[0]}`", []).append(f"{100 * gain:.1f}")
    seeds = list(dict.fromkeys(run.rpartition("-")[2] for run in found))
    return markdown(["gain of seed", *seeds], [[arm, *gains] for arm, gains in arms.items()])


def steps_table(found: dict[str, Any]) -> str:
    """The calibrated band of a run, and the range of σ̂ over its steps."""
    rows = [
        [seed, f"{one['c'][-1]:.3f}", f"{min(one['sigma_hat']):.3f}–{max(one['sigma_hat']):.3f}"]
        for seed, one in found.items()
    ]
    return markdown(["seed", "c", "σ̂ of steps"], rows)


def clip_table(found: dict[str, Any]) -> str:
    """Share outside the band by length, and how far acceptance depends on it."""
    rows = []
    for run, one in found.items():
        records = one["records"]
        bins = ", ".join(
            f"{100 * part['out_of_band']:.0f}% ({part['low']}–{part['high']})"
            for part in records["by length"]
        )
        lre = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**records["lre"])
        shares = (f"{100 * records[name]:.1f}%" for name in ("out_of_band", "clipped"))
        rows.append([run, *shares, bins, lre, f"{records['lre by chance']:.2f}"])
    return markdown(["seed", "out of band", "clipped", "by length (tokens)", "LRE", "by chance"], rows)


def examples(seed: str) -> str:
    """Every tenth held-out response before and after."""
    lines = [f"# A tenth of the held-out responses, before and after (seed {seed})", ""]
    problems = lines_of(RUNS / "smollm2/before/problems.jsonl")
    prompts = {(row["set"], row["index"]): row for row in problems}
    before, after = (
        {(row["set"], row["index"], row["sample"]): row for row in lines_of(folder / "samples.jsonl")}
        for folder in (RUNS / "smollm2/before", RUNS / f"smollm2/after-{seed}")
    )
    for key in sorted(before)[::10]:
        prompt = prompts[key[:2]]
        question = prompt["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        lines += [f"**{question}** ({prompt['answer']})", ""]
        for name, rows in (("before", before), ("after", after)):
            mark = "right" if rows[key]["score"] else "wrong"
            lines.append(f"- {name}, {mark}: {json.dumps(rows[key]['response'], ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
