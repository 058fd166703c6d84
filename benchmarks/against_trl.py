"""Response tokens per second of ours beside TRL, verl and plain torch: same model, prompts, sizes and cores.

    make .venv-trl/.ready .venv-verl/.ready runs/smollm2/checkpoint/config.json
    python benchmarks/against_trl.py examples/smollm2/run.toml examples/make_sum/run.toml

Whole steps, from prompts to the last optimizer step, of ours and of TRL's GRPOTrainer; and the update: the
pass before it and the optimizer steps of all epochs, also of verl's FSDP engine and of plain torch. TRL's
responses are its own, the others' as long as those of ours that have a gradient: without a spread of rewards
in their group they have none, and ours leaves them out. All take turns, in float32, data parallel, with
ratios of sequences. Only ratios mean anything. The learning rate is next to nothing, so lengths do not drift.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from machine import ROOT, cpu, environment, markdown, options_of
from megatron_fspo.config.loading import load_config
from megatron_fspo.data.prompts import load_sets
from megatron_fspo.data.tokenizer import load_tokenizer

HERE = Path(__file__).parent
LEARNING_RATE = 1e-12
OURS = "--parallel.tensor 1 --parallel.sequence false --evaluation.every 0 --checkpoint.every 0 --run.seed 1"
OURS += f" --optimizer.lr {LEARNING_RATE} --log.sequences 1000000 --run.name run"
SKIPPED = 1
"""Steps at the beginning that are not counted: caches fill, memory is touched for the first time."""


def main() -> None:
    """Run all on each configuration, and print the ratios; results of other configurations stay."""
    parser = options_of(__doc__)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--nproc", type=int, default=2, help="processes of each, a thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/against_trl.json")
    args = parser.parse_args()
    others = {"TRL": ("trl", ".venv-trl"), "verl": ("verl", ".venv-verl"), "plain torch": ("plain", ".venv")}
    missing = [venv for _, venv in others.values() if not (ROOT / venv / "bin/python").exists()]
    if missing:
        raise SystemExit(f"make {' '.join(f'{venv}/.ready' for venv in missing)}")
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for path in args.configs:
        job = job_of(path, args)
        rounds: dict[str, list[Any]] = {name: [] for name in ("ours", *others)}
        for _ in range(args.rounds):
            rounds["ours"].append(ours(path, args, job))
            for name, (worker, venv) in others.items():
                rounds[name].append(theirs(job, worker, ROOT / venv / "bin/python", args.nproc))
        results[str(path)] = {"machine": cpu(), "nproc": args.nproc, "rounds": rounds}
        args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(table(results, "step", "TRL"), table(results, "update", "plain torch"), sep="\n\n")


def table(results: Mapping[str, Any], phase: str, base: str) -> str:
    """Tokens per second of "step" or "update", median and range of the rounds, as multiples of ``base``."""
    rows, names = [], []
    for path, found in results.items():
        rates = {
            name: [rate(one, phase) for one in rounds]
            for name, rounds in found["rounds"].items()
            if phase in rounds[0]
        }
        names, unit = list(rates), median(rates[base])
        cells = [[value / unit for value in (median(r), min(r), max(r))] for r in rates.values()]
        rows.append([f"`{path}`", *(f"{at:.2f} ({low:.2f}–{high:.2f})" for at, low, high in cells)])
    return markdown(["configuration", *names], rows)


def rate(one: Mapping[str, Any], phase: str) -> float:
    """Tokens per second of the phase in a run; of an update, those that it was of."""
    tokens = one["trained"] if phase == "update" and "trained" in one else one["tokens"]
    return float(sum(tokens[SKIPPED:]) / sum(one[phase][SKIPPED:]))


def trained(path: Path, args: argparse.Namespace, old: str) -> list[list[Any]]:
    """Metrics and records of sequences of a run of ours, by step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megatron_fspo", "train", "--config", str(path), *OURS.split()]
        command += ["--nproc", str(args.nproc), "--run.folder", folder, "--run.steps", str(args.steps)]
        _run([*command, "--rollout.old_log_probs", old])
        files = [Path(folder) / "run" / name for name in ("metrics.jsonl", "sequences.jsonl")]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def job_of(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What workers are told: sizes of the configuration, its prompts, and how long responses are."""
    config = load_config(path, [])
    mini_batches, epochs = config.batch.mini_batches, config.batch.epochs
    # From the sampler's log-probs no optimizer step is on-policy, so the records are of all.
    rows, records = trained(path, args, "sampled")
    sets = load_sets(config.data, "train", load_tokenizer(config.model.checkpoint))
    trained_on = [one["length"][: len(one["length"]) // epochs] for one in records]
    return {
        "model": str(config.model.checkpoint),
        "texts": [prompt.text for one in sets for prompt in one.prompts],
        "prompt_tokens": [round(row["prompt_length/mean"]) for row in rows],
        "lengths": [[some[i::mini_batches] for i in range(mini_batches)] for some in trained_on],
        "responses": [row["response_length/mean"] for row in rows],
        "batch": config.rollout.prompts * config.rollout.samples // mini_batches,
        "samples": config.rollout.samples,
        "max_response_tokens": config.rollout.max_response_tokens,
        "max_tokens": config.batch.max_tokens,
        "epochs": epochs,
        "lr": LEARNING_RATE,
    }


def ours(path: Path, args: argparse.Namespace, job: Mapping[str, Any]) -> dict[str, list[float]]:
    """Response tokens, of all and of those with a gradient, and seconds of each step."""
    rows, _ = trained(path, args, "recompute")
    if [row["response_length/mean"] for row in rows] != job["responses"]:
        raise SystemExit(f"{path}: other responses than in the record")
    return {
        "tokens": [mean * job["batch"] * len(job["lengths"][0]) for mean in job["responses"]],
        "trained": [sum(map(sum, step)) for step in job["lengths"]],
        "step": [row["timing_s/step"] for row in rows],
        "update": [row["timing_s/old_log_prob"] + row["timing_s/update_actor"] for row in rows],
    }


def theirs(job: Mapping[str, Any], worker: str, python: Path, processes: int) -> dict[str, list[float]]:
    """The same of a worker."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        _run([str(python), *launch, str(HERE / f"{worker}_run.py"), str(file)])
        parts = [json.loads(part.read_text()) for part in sorted(Path(folder).glob("job.*.json"))]
    tokens = zip(*(part["tokens"] for part in parts), strict=True)
    return parts[0] | {"tokens": [sum(step) for step in tokens]}


def _run(command: list[str]) -> None:
    env = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] += f":{HERE}"  # for rewards of the benchmarks
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
