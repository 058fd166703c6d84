"""What ``megatron-fspo plan`` says of memory, beside what the trainer's own code allocates on a CPU.

    python benchmarks/plan_memory.py

SmolLM2-135M and a random model of the shape of Qwen3-0.6B, with all their layers: with and without recompute,
tensor, pipeline and context parallel, the distributed optimizer. Up to two processes and 16 GB; layers are
the local ones. Bytes of tensors, on the worst rank. docs/plan.md says what is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import ROOT, environment, machine, options_of
from megatron_fspo.config import Parallel
from megatron_fspo.lab.plan.activations import activations
from megatron_fspo.lab.plan.shape import PlannedPack, Shape
from megatron_fspo.lab.plan.state import checkpoint_bytes, kv_bytes, sending_bytes, state

Case = Mapping[str, Any]
EXACT = ("parameters", "gradients", "optimizer", "checkpoint", "cache")
NEAR = ("held", "peak", "sent")
MODELS = ("smollm2-135m", "qwen3-0.6b")
# A prompt and a response each; 1,024 tokens together, 512 on each rank of context parallel.
SHAPES = ((32, 96), (64, 320), (16, 240), (8, 248))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, recompute": {"recompute": True},
    "one rank, bf16": {"dtype": "bfloat16"},
    "TP2": {"parallel": {"tensor": 2}},
    "TP2 + sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "TP2 + sequence, recompute": {"parallel": {"tensor": 2, "sequence": True}, "recompute": True},
    "PP2": {"parallel": {"pipeline": 2}, "packs": 3},
    "PP2, recompute": {"parallel": {"pipeline": 2}, "packs": 3, "recompute": True},
    "CP2": {"parallel": {"context": 2}},
    "CP2, recompute": {"parallel": {"context": 2}, "recompute": True},
}


def cases(model: str) -> dict[str, Case]:
    """Of a model, by name."""
    plain = {"model": model, "dtype": "float32", "parallel": {}, "shapes": SHAPES}
    # 9 heads do not split over two ranks.
    return {
        name: {**plain, **more}
        for name, more in LAYOUTS.items()
        if not (model.startswith("smollm2") and "tensor" in more.get("parallel", {}))
    }


def planned(case: Case, found: Mapping[str, Any], world: int) -> dict[str, float]:
    """What the plan says of what was found on a rank."""
    from plan_rank import DTYPES, architecture

    shape = Shape(
        arch=architecture(case),
        parallel=Parallel(**case["parallel"]),
        world=world,
        dtype=DTYPES[case["dtype"]],
        layers="local",
        device="cpu",
        recompute=case.get("recompute", False),
    )
    pack = PlannedPack(lengths=tuple(found["lengths"]), scored=found["scored"])
    step = activations(shape, found["stage"], pack, case.get("packs", 1))
    result: dict[str, float] = {"held": step.held, "peak": step.held + max(step.moments.values())}
    if case.get("state"):
        rows, tokens = case["rows"]
        result |= vars(state(shape, found["stage"], found["rank"]))
        result |= {"checkpoint": checkpoint_bytes(shape), "cache": kv_bytes(shape, rows=rows, tokens=tokens)}
        result["sent"] = sending_bytes(shape)
    return result


def measure(asked: Sequence[Case], nproc: int) -> list[list[dict[str, Any]]]:
    """By case and rank what real ranks found."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(nproc), str(ROOT / "benchmarks/plan_rank.py"), str(out)]
        subprocess.run(
            [*command, json.dumps(asked)],
            env=environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
            check=True,
        )
        found: list[list[dict[str, Any]]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def rows_of(model: str, name: str, case: Case, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measured and planned bytes of the rank with the highest peak, and the worst ratio of all ranks."""
    plans = [planned(case, found, len(ranks)) for found in ranks]
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank]["peak"])
    ratios = {
        key: max((plan[key] / found[key] for plan, found in zip(plans, ranks, strict=True)), key=_distance)
        for key in ("held", "peak")
    }
    return {
        "model": model,
        "layout": name,
        "tokens": sum(ranks[worst]["lengths"]),
        **{f"{key}_measured": ranks[worst][key] for key in ratios},
        **{f"{key}_planned": round(plans[worst][key]) for key in ratios},
        **{f"{key}_worst_ratio": round(ratio, 4) for key, ratio in ratios.items()},
    }


def _distance(ratio: float) -> float:
    return abs(ratio - 1)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, help="of each model (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/plan_memory.json")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for name, case in cases(model).items():
            whole = {**case, "layers": options.layers} if options.layers else case
            # A process each: what one case leaves behind is not in the next one's way.
            (ranks,) = measure([whole], 2 if case["parallel"] else 1)
            rows.append(rows_of(model, name, whole, ranks))
            print(rows[-1], flush=True)
            report = {"command": "python benchmarks/plan_memory.py", "machine": machine(), "rows": rows}
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
