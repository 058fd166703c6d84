"""The step of every shipped layout, taken by the trainer's own code without a GPU, beside ``plan``.

    .venv312-te/bin/python benchmarks/trace_layouts.py     # as make test-fake-gpu installs it

Qwen3-8B, 1.7B, 32B and 30B-A3B with all layers, a rank of each pipeline stage that differs; half a minute
each, minutes with experts. docs/plan.md has the table, docs/without_a_gpu.md what it proves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from machine import ROOT, machine, options_of
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.plan.plan import ROUTES, Given, make_plan
from megatron_fspo.lab.plan.presets import find_model
from megatron_fspo.lab.trace.command import traces
from megatron_fspo.lab.trace.record import Request

RESULTS = ROOT / "benchmarks/results/trace_layouts.json"
MIXTURE = "../qwen3_30b_a3b"
LENT = {"parallel.tensor": "4", "batch.max_tokens": "16384"}
"""Not the shipped TP2, whose trace lends the host 19 GiB."""
# Name → files, model, ranks that train, the rank, further keys.
CASES: Mapping[str, tuple[str, str, int, int, dict[str, str]]] = {
    "8B, one node that also samples": ("run", "qwen3-8b", 8, 0, {}),
    "8B, one_node": ("run one_node", "qwen3-8b", 4, 0, {}),
    "8B, two_nodes": ("run two_nodes", "qwen3-8b", 8, 0, {}),
    "8B, colocated, TP4": ("run colocated", "qwen3-8b", 8, 0, LENT),
    "8B, four_nodes": ("run four_nodes", "qwen3-8b", 16, 0, {}),
    "8B, rank 37 of 64, CP2": ("run two_nodes", "qwen3-8b", 64, 37, {"parallel.context": "2"}),
    "8B, PP2, first stage": ("run", "qwen3-8b", 8, 0, {"parallel.tensor": "4", "parallel.pipeline": "2"}),
    "8B, PP2, last stage": ("run", "qwen3-8b", 8, 7, {"parallel.tensor": "4", "parallel.pipeline": "2"}),
    "8B, one_node, recompute": ("run one_node", "qwen3-8b", 4, 0, {"model.recompute": "full"}),
    "8B, two_nodes, FP8 by block": ("run two_nodes fp8", "qwen3-8b", 8, 0, {}),
    "8B, colocated, TP4, FP8 by block": ("run colocated fp8", "qwen3-8b", 8, 0, LENT),
    "8B, two_nodes, FP8 by tensor": ("run two_nodes fp8", "qwen3-8b", 8, 0, {"fp8.recipe": "tensorwise"}),
    "8B, one node, local layers": ("run", "qwen3-8b", 8, 0, {"model.layers": "local"}),
    "8B, two_nodes, local layers": ("run two_nodes", "qwen3-8b", 8, 0, {"model.layers": "local"}),
    "1.7B": ("run ../qwen3_1_7b/run", "qwen3-1.7b", 4, 0, {}),
    "32B, TP8, DP8": ("run two_nodes", "qwen3-32b", 64, 0, {"parallel.tensor": "8"}),
    "30B-A3B, two_nodes": (f"run {MIXTURE}/run {MIXTURE}/two_nodes", "qwen3-30b-a3b", 8, 0, {}),
    "30B-A3B, four_nodes": (f"run {MIXTURE}/run {MIXTURE}/four_nodes", "qwen3-30b-a3b", 16, 0, {}),
}


def main() -> None:
    """Trace them all, and write the results."""
    options_of(__doc__).parse_args()
    configs, requests = {}, []
    for name, (files, model, world, rank, keys) in CASES.items():
        paths = [(ROOT / "examples/qwen3_8b" / f"{file}.toml").resolve() for file in files.split()]
        overrides = [word for key, value in keys.items() for word in (f"--{key}", value)]
        configs[name] = load_config(paths, overrides)
        tree = configs[name].model_dump(mode="json")
        requests.append(Request(config=tree, model=model, world=world, rank=rank))
    rows = {}
    for (name, config), request, seen in zip(configs.items(), requests, traces(requests), strict=True):
        assert seen["error"] is None, (name, seen["traceback"])
        rows[name] = row(seen, config, request)
        print(name, rows[name])
    RESULTS.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def row(seen: Mapping[str, Any], config: Any, request: Request) -> dict[str, float]:
    """The figures of a table's row: bytes, and counts of a micro-batch."""
    stage = request.rank * config.parallel.pipeline // request.world
    plan = make_plan(config, find_model(request.model), Given(world=request.world)).stages[stage]
    # A trace has four micro-batches in a step, and so hardly any routes.
    update = sum(size for name, size in plan.phases["update"].items() if name != ROUTES)
    state = sum(plan.always.values())
    in_update = [one for one in seen["syncs"] if one["phase"] == "update"]
    return {
        "peak": seen["peaks"]["update"],
        "planned": state + update,
        "state": seen["state"],
        "planned_state": state,
        "flops": seen["flops"]["update"] / seen["micro_batches"],
        "launches": seen["launches"]["update"] / seen["micro_batches"],
        "sent": sum(one["sent"] for one in seen["collectives"] if one["phase"] == "update") / 2,
        "syncs": sum(one["count"] for one in in_update) / seen["micro_batches"],
        "left": seen.get("left", 0),
    }


if __name__ == "__main__":
    main()
