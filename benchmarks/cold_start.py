"""SFT, then FSPO, then distillation of SmolLM2-135M on arithmetic, three seeds: docs/real_model.md.

    make runs/smollm2/checkpoint/config.json
    python benchmarks/cold_start.py    # about an hour on two quiet cores
    python benchmarks/cold_start.py --seeds 9 --folder /tmp/c --out /tmp/c.json --run.steps 1    # machinery

SFT learns from 253 answers, FSPO goes on from there, and the model before both learns from the result of both
what that says of its own responses. A phase has 16 steps and is evaluated on the 150 held-out questions.

Claims, written before the runs, for each seed, with paired 95% intervals over questions: SFT gains, so does
FSPO over SFT, and distillation brings the first model half of the way to its teacher or more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import ROOT, cpu, environment, markdown, options_of
from megatron_fspo.evaluation.results import AVERAGE
from real_model import interval, scores

EXAMPLE = ROOT / "examples/smollm2"
PHASES = {
    "sft": (["sft.toml"], "before", "before"),
    "fspo": (["run.toml"], "sft", "sft"),
    "distil": (["run.toml", "distil.toml"], "before", "before"),
}
"""Phase → its configuration, the phase whose model it begins with, and the one that it is compared with."""


def command(*words: str) -> None:
    """Run the command line, on two processes of one thread each."""
    full = [sys.executable, "-m", "megatron_fspo", *words, "--nproc", "2"]
    subprocess.run(full, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"), check=True, stdout=sys.stderr)


def evaluated(model: Path, out: Path, *more: str) -> dict[str, Any]:
    """Held-out results of a model, made unless they are there."""
    if not (out / "results.json").exists():
        config = str(EXAMPLE / "run.toml")
        command("evaluate", "--config", config, "--model", str(model), "--out", str(out), *more)
    found: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return found


def chain(folder: Path, base: Path, seed: int, words: list[str]) -> dict[str, Any]:
    """Accuracy after each phase of a seed and its paired gain, × 1, with intervals; seconds of its steps."""
    models = {"before": base}
    results = {"before": folder / "before"}
    found = {}
    for phase, (configs, start, other) in PHASES.items():
        run = folder / f"{phase}-{seed}"
        given = [word for name in configs for word in ("--config", str(EXAMPLE / name))]
        given += ["--model.checkpoint", str(models[start]), "--run.folder", str(folder)]
        given += ["--run.name", run.name, "--run.seed", str(seed), *words]
        if phase == "distil":
            given += ["--teacher.checkpoint", str(models["fspo"])]
        if not (run / "hf").exists():
            command("train", *given)
        models[phase], results[phase] = run / "hf", folder / f"{run.name}-held-out"
        after = evaluated(models[phase], results[phase], "--compare", str(results[other]))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[phase] = {
            "after": scores(after),
            "gain": scores(after["comparison"]["difference"])[AVERAGE]["mean"],
            "seconds": sum(row.get("timing_s/step", 0) for row in rows),
        }
    return found


def table(found: Mapping[str, Any]) -> str:
    """Lines for docs/real_model.md: accuracy × 100 after every phase, what FSPO gains over SFT, and the
    share of its teacher's gain that the distilled model has."""
    rows, first = [], found["before"][AVERAGE]["mean"]["value"]
    for seed, phases in found["runs"].items():
        sft, fspo, distil = (interval(one["after"][AVERAGE]["mean"]) for one in phases.values())
        teacher = phases["fspo"]["after"][AVERAGE]["mean"]["value"] - first
        share = f"{phases['distil']['gain']['value'] / teacher:.0%}"
        rows.append([seed, sft, fspo, f"**{interval(phases['fspo']['gain'], '+')}**", distil, share])
    return markdown(["seed", "SFT", "FSPO", "its gain", "distilled", "of teacher's gain"], rows)


def main() -> None:
    """Make the runs and evaluations; print a table; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/smollm2/cold_start")
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smollm2/checkpoint")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cold_start.json")
    args, words = parser.parse_known_args()
    folder = args.folder.resolve()
    before = evaluated(args.model, folder / "before")
    runs = {str(seed): chain(folder, args.model.resolve(), seed, words) for seed in args.seeds}
    found = {"cpu": cpu(), "words": words, "before": scores(before), "runs": runs}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
