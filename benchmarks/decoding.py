"""Seconds a token of the embedded sampler by the length of its rows, beside another version's, on one thread.

    python benchmarks/decoding.py

64 rows, random weights in SmolLM2-135M's shape with 4 and with all 30 of its layers; then the run of
`make demo`, 4 steps. The rounds go through all versions in turn, each in a process of its own; the smallest
time counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from machine import ROOT, environment, machine, markdown, options_of

BEFORE = "290a28f"
"""Its keys were rotated anew for every token."""
LENGTHS = (100, 300, 1000)
LAYERS = (4, 30)
ROWS, TOKENS = 64, 4
RESULTS = ROOT / "benchmarks/results/decoding.json"


def seconds_a_token(layers: int, rows: int = ROWS, lengths: tuple[int, ...] = LENGTHS) -> dict[int, float]:
    """By length, in this process; the least of some tokens."""
    from megatron_fspo.config import Parallel
    from megatron_fspo.mcore.machine.backend import choose_backend
    from megatron_fspo.mcore.machine.startup import start, stop
    from megatron_fspo.mcore.model.policy import Model
    from megatron_fspo.mcore.passes.decode import Decoder
    from megatron_fspo.weights.architecture import Architecture

    sizes = {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "ffn_size": 1536}
    more = {"vocab_size": 49152, "tied": True, "rms_norm_eps": 1e-5, "rope_theta": 1e5}
    more |= {"max_position_embeddings": 8192, "dtype": torch.float32}
    arch = Architecture(model_type="llama", num_layers=layers, **sizes, **more)
    backend, parallel = choose_backend("cpu"), Parallel()
    groups = start(backend, parallel=parallel, seed=1)
    model = Model(arch, backend, groups, parallel=parallel, dtype=torch.float32)
    for parameter in model.chunks[0].parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    decoder, result = Decoder(model.chunks, groups, vocab_size=arch.vocab_size), {}
    for length in lengths:
        with decoder.session(slots=1, max_tokens=length + TOKENS):
            decoder.feed([[5] * length])
            decoder.keep([0] * rows)
            taken = []
            for _ in range(TOKENS):
                began = time.perf_counter()
                decoder.feed([[7]] * rows)
                taken.append(time.perf_counter() - began)
            result[length] = min(taken)
    stop()
    return result


def seconds_a_step(tree: Path, folder: Path, steps: int = 4) -> dict[str, float]:
    """Of the demo on two processes: medians over its steps but the first."""
    words = ["train", "--config", "examples/make_sum/run.toml", "--nproc", "2", "--run.folder", str(folder)]
    words += ["--run.steps", str(steps), "--evaluation.every", "0", "--checkpoint.every", "0"]
    call([sys.executable, "-m", "megatron_fspo", *words], tree)
    lines = (folder / "demo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines][1:]
    return {key: statistics.median(each[f"timing_s/{key}"] for each in metrics) for key in ("step", "gen")}


def call(command: list[str], tree: Path) -> str:
    """Run with the package of a checkout; what it prints."""
    env = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{command} failed")
    return done.stdout


def compare(before: Path, rounds: int) -> dict[str, Any]:
    """Smallest times of both versions."""
    trees = {"before": before, "now": ROOT}
    tokens: dict[str, dict[str, dict[str, float]]] = {name: {} for name in trees}
    steps: dict[str, dict[str, float]] = {name: {} for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            for layers in LAYERS:
                out = call([sys.executable, __file__, "--in-this-process", str(layers)], tree)
                new = json.loads(out.splitlines()[-1])
                least(tokens[name].setdefault(str(layers), {}), new)
            with TemporaryDirectory() as folder:
                least(steps[name], seconds_a_step(tree, Path(folder)))
    return {"seconds_a_token": tokens, "seconds_a_step": steps}


def least(known: dict[str, float], new: dict[str, float]) -> None:
    for key, seconds in new.items():
        known[key] = round(min(seconds, known.get(key, seconds)), 4)


def table(result: dict[str, Any]) -> str:
    """As docs/performance.md has it: milliseconds a token, and seconds a step of the demo."""
    rows = [
        [f"{layers} layers, {name}", *(f"{1000 * by_length[str(length)]:,.0f}" for length in LENGTHS)]
        for layers in map(str, LAYERS)
        for name, by_length in ((name, each[layers]) for name, each in result["seconds_a_token"].items())
    ]
    return markdown(["ms a token of 64 rows, at length", *map(str, LENGTHS)], rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-this-process", type=int, help="measure one model; its layers")
    args = parser.parse_args()
    if args.in_this_process:
        print(json.dumps(seconds_a_token(args.in_this_process)))
        return
    with TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "archive", BEFORE, "megatron_fspo"], cwd=ROOT)
        tarfile.open(fileobj=BytesIO(archive)).extractall(folder, filter="data")
        result = compare(Path(folder), args.rounds)
    head = {"command": "python benchmarks/decoding.py", "machine": machine(), "before": BEFORE}
    text = json.dumps(head | {"rounds": args.rounds} | result, indent=1)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
