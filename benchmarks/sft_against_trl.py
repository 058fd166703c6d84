"""Response tokens per second of SFT beside TRL's SFTTrainer: same model, rows, batch size and cores.

    make .venv-trl/.ready runs/smollm2/checkpoint/config.json
    python benchmarks/sft_against_trl.py

Rows are a prompt of 16 to 64 random words and a response of 16 to 256, so lengths vary as in real data. Both
train in float32 on two processes of one thread each. TRL pads, since its packing needs a kernel that CPUs
lack. Claim, written before the first run: ours is faster by 1.3 or more, by packing and by logits of response
tokens only.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from machine import ROOT, cpu, environment, markdown, options_of
from megatron_fspo.data.tokenizer import load_tokenizer

WORKER = Path(__file__).with_name("trl_sft_run.py")
SKIPPED = 1
"""Steps at the beginning that are not counted."""
CONFIG = """
[run]
name = "run"
[data]
preset = "completion"
max_prompt_tokens = 400
shuffle = false
[rollout]
max_response_tokens = 1000
[loss]
name = "sft"
[batch]
max_tokens = 2048
[optimizer]
lr = 1e-12
[evaluation]
every = 0
[checkpoint]
every = 0
"""


def write_rows(path: Path, words: list[str], count: int) -> None:
    """Write rows of random words."""
    rng = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            prompt, completion = (
                " ".join(rng.choices(words, k=round(low * (high / low) ** rng.random())))
                for low, high in ((16, 64), (16, 256))
            )
            file.write(json.dumps({"prompt": prompt, "completion": f" {completion}"}) + "\n")


def ours(folder: Path, model: Path, batch: int, steps: int, nproc: int) -> dict[str, list[float]]:
    """Response tokens and seconds of each step."""
    (folder / "sft.toml").write_text(CONFIG)
    words = f"--config {folder}/sft.toml --model.checkpoint {model} --data.train {folder}/rows.jsonl"
    words += f" --run.folder {folder} --run.steps {steps} --rollout.prompts {batch} --nproc {nproc}"
    command = [sys.executable, "-m", "megatron_fspo", "train", *words.split()]
    subprocess.run(command, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"), check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    tokens = [row["response_length/mean"] * batch for row in rows]
    return {"tokens": tokens, "step": [row["timing_s/step"] for row in rows]}


def theirs(folder: Path, model: Path, batch: int, steps: int, nproc: int) -> dict[str, list[float]]:
    """The same of TRL."""
    job = {"rows": str(folder / "rows.jsonl"), "model": str(model), "batch": batch // nproc, "steps": steps}
    (folder / "job.json").write_text(json.dumps(job))
    launch = [str(ROOT / ".venv-trl/bin/python"), "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc-per-node={nproc}", str(WORKER), str(folder / "job.json")]
    subprocess.run(command, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"), check=True, stdout=sys.stderr)
    parts = [json.loads(part.read_text()) for part in sorted(folder.glob("job.*.json"))]
    return {"tokens": [sum(step) for step in zip(*(part["tokens"] for part in parts), strict=True)],
            "step": parts[0]["step"]}  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    """Lines for docs/performance.md: median and range of the rounds, relative to TRL's median."""
    rates = {
        name: [sum(one["tokens"][SKIPPED:]) / sum(one["step"][SKIPPED:]) for one in rounds]
        for name, rounds in found["rounds"].items()
    }
    unit = median(rates["TRL"])
    cells = [[value / unit for value in (median(r), min(r), max(r))] for r in rates.values()]
    row = ["SFT, SmolLM2", *(f"{at:.2f} ({low:.2f}–{high:.2f})" for at, low, high in cells)]
    return markdown(["", *rates], [row])


def main() -> None:
    """Run both in turns; print the ratios; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smollm2/checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sft_against_trl.json")
    args = parser.parse_args()
    tokens = sorted(load_tokenizer(args.model).get_vocab())
    plain = [token[1:] for token in tokens if token[0] == "Ġ"]
    words = [one for one in plain if one.isascii() and one.isalpha()]
    rounds: dict[str, list[Any]] = {"ours": [], "TRL": []}
    for _ in range(args.rounds):
        for name, run in (("ours", ours), ("TRL", theirs)):
            with tempfile.TemporaryDirectory() as folder:
                write_rows(Path(folder, "rows.jsonl"), words, args.batch * args.steps)
                rounds[name].append(
                    run(Path(folder), args.model.resolve(), args.batch, args.steps, args.nproc)
                )
    counted = {tuple(map(round, one["tokens"])) for some in rounds.values() for one in some}
    if len(counted) > 1:
        raise SystemExit(f"not the same tokens in all runs: {counted}")
    found = {"cpu": cpu(), "batch": args.batch, "rounds": rounds}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
