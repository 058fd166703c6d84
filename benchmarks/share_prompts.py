"""What a prompt costs that is computed once for its group, against once for each of its responses.

    OMP_NUM_THREADS=1 python benchmarks/share_prompts.py

One group in one pack, forward and backward by `Policy.backward`, of two layers of SmolLM2-135M in float32 and
a vocabulary of 1,024. Seconds are CPU seconds of one thread, the less of two; memory is the most
that tensors hold beside model and optimizer. The last row has another prompt for each response: nothing is
shared. --part measures what is done in a few minutes.
"""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from machine import ROOT, machine, markdown, options_of
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.packing.batch import Sequences
from megatron_fspo.packing.pack import PackLayout, pack
from plan_rank import LiveBytes, build

RESULTS = ROOT / "benchmarks/results/share_prompts.json"
COMMAND = "python benchmarks/share_prompts.py"
GROUPS = (4, 8, 16)
SIZES = [*product((64, 256, 1024), (64, 256, 1024), GROUPS), (256, 128, 8)]
PART = [(64, 64, 8), (64, 256, 8), (256, 64, 8), (256, 128, 8), (256, 256, 8), (1024, 64, 8), (256, 64, 16)]
MODEL = {"model": "smollm2-135m", "layers": 2, "vocab_size": 1024, "parallel": {}, "dtype": "float32"}


def measure(policy: Policy, prompt: int, response: int, group: int, *, prompts: int = 1) -> dict[str, Any]:
    """One pack of `group` responses to so many prompts, sharing off and on."""
    ids = torch.arange(prompts * prompt).view(prompts, prompt) % 1000
    sequences = Sequences.of(
        prompts=[ids[i % prompts] for i in range(group)],
        responses=[torch.arange(i, i + response) % 1000 for i in range(group)],
        advantages=[(-1) ** i * (1 + i / 16) for i in range(group)],
    )
    scoring = Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=1.0)
    loss = PolicyLoss(objective=FSPOLoss(c_low=0.03, c_high=0.03).objective(), scoring=scoring)
    row: dict[str, Any] = {"prompt": prompt, "response": response, "group": group, "prompts": prompts}
    norms = []
    micro_batches = {on: pack(sequences, PackLayout(share_prompts=on == "on")) for on in ("off", "on")}
    for on, some in micro_batches.items():  # warms up, too
        with LiveBytes() as counted:
            policy.backward(some, loss)
        norms.append(policy.grad_norm())
        row[f"tokens_{on}"], row[f"bytes_{on}"], row[f"seconds_{on}"] = (
            some.tokens,
            counted.peak,
            float("inf"),
        )
    for _ in range(2):
        for on, some in micro_batches.items():
            start = time.thread_time()
            policy.backward(some, loss)
            row[f"seconds_{on}"] = min(row[f"seconds_{on}"], time.thread_time() - start)
    assert abs(norms[1] / norms[0] - 1) < 1e-4, norms
    return row


def table(report: dict[str, Any]) -> str:
    """As docs/performance.md has it: speedup by size of the group, and the memory of groups of 8."""
    kinds: dict[tuple[int, int, int], dict[int, Any]] = {}
    for row in report["rows"]:
        kinds.setdefault((row["prompt"], row["response"], row["prompts"]), {})[row["group"]] = row
    cells = [
        [
            f"{prompt:,}" + (", one per response" if prompts > 1 else ""),
            f"{response:,}",
            *(f"{r['seconds_off'] / r['seconds_on']:.2f}" if (r := rows.get(n)) else "–" for n in GROUPS),
            f"{rows[8]['bytes_off'] / 2**20:,.0f} → {rows[8]['bytes_on'] / 2**20:,.0f}",
        ]
        for (prompt, response, prompts), rows in kinds.items()
    ]
    speedups = [f"speedup, group of {group}" for group in GROUPS]
    return markdown(["prompt", "response", *speedups, "peak MiB, group of 8"], cells)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--part", action="store_true")
    args = parser.parse_args()
    policy = build(MODEL)
    report: dict[str, Any] = {"command": COMMAND + " --part" * args.part, "machine": machine(), "rows": []}
    for size in PART if args.part else SIZES:
        report["rows"].append(measure(policy, *size))
        print(report["rows"][-1], flush=True)
    report["rows"].append(measure(policy, 256, 128, 8, prompts=8))
    stop()
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
