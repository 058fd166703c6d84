"""Matrix products in float32 on one CPU core: torch's own (MKL) beside oneDNN's, forward and both gradients.

OMP_NUM_THREADS=1 python benchmarks/cpu_products.py
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from machine import ROOT, cpu, markdown, options_of
from megatron_fspo.mcore.machine.cpu_products import install_products, onednn_is_faster

LAYERS = {"make-sum": ((192, 96), (512, 96), (96, 256)), "SmolLM2": ((960, 576), (3072, 576), (576, 1536))}
TOKENS = (64, 640, 3000)


def rates(rounds: int = 7) -> list[float]:
    """GFLOP/s of each row of the table, by CPU time; the fastest of some rounds."""
    found = []
    for shapes in LAYERS.values():
        for out, inside in shapes:
            for tokens in TOKENS:
                x, w, slope = torch.randn(tokens, inside), torch.randn(out, inside), torch.randn(tokens, out)
                seconds = []
                for _ in range(rounds):
                    began = time.process_time()
                    for _ in range(4):
                        x @ w.T, slope @ w, slope.T @ x
                    seconds.append((time.process_time() - began) / 4)
                found.append(6 * tokens * out * inside / min(seconds) / 1e9)
    return found


def main() -> None:
    """Print the table; write the figures."""
    options_of(__doc__).parse_args()
    names = [(name, out, inside, t) for name, some in LAYERS.items() for out, inside in some for t in TOKENS]
    before = rates()
    install_products()
    rows = [(*name, was, now) for name, was, now in zip(names, before, rates(), strict=True)]
    found = {"machine": cpu(), "torch": torch.__version__, "taken": onednn_is_faster(), "rows": rows}
    (ROOT / "benchmarks/results/cpu_products.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """oneDNN's rate as a multiple of MKL's, a row per weight."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name, out, inside, _, was, now in found["rows"]:
        cells.setdefault((name, f"{out} × {inside}"), []).append(f"{now / was:.1f}")
    head = ["model", "weight", *(f"{tokens:,} tokens" for tokens in TOKENS)]
    return markdown(head, [[*names, *speedups] for names, speedups in cells.items()])


if __name__ == "__main__":
    main()
