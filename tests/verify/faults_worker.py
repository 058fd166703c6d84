"""On every rank: a training step under each fault, and what ``verify`` says of it; the same without faults.

faults_worker.py OUT [FAULT...]
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from faults import FAULTS
from patching import Fault, Patch

from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import join, start, stop
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.verify.cases import TEMPERATURE, cases, make_routes, make_samples, random_weights
from megatron_fspo.verify.layouts import Layout, choose_model, parse_layout
from megatron_fspo.verify.production import build
from megatron_fspo.verify.reference import Reference
from megatron_fspo.verify.run import check_cases, references
from megatron_fspo.weights import Architecture

BACKEND = choose_backend("cpu")
CASES = {case.name: case for case in cases(None, 0, experts=True)}


@dataclass(frozen=True, kw_only=True)
class FaultyLayout:
    """A layout with the references of its models."""

    layout: Layout
    groups: ParallelGroups
    arch: Architecture
    wanted: dict[Architecture, dict[str, Reference]]
    """Model → case → reference."""

    def step(self, fault: Fault, dtype: torch.dtype, patch: Patch) -> dict[str, object]:
        """One training step with the patch, and what is said of it."""
        model = replace(self.arch, tied=fault.tied)
        case = replace(CASES[fault.loss], split=fault.split, replay=fault.replay, share=fault.share)
        routes = make_routes(model, make_samples(model)) if model.experts else None
        with patch:
            policy = build(self.layout, model, random_weights(model), BACKEND, self.groups, dtype)
            (result,) = check_cases(policy, self.layout, [case], self.wanted[model], TEMPERATURE, routes)
        errors = result.errors
        return {
            "problems": result.problems,
            "parameter": errors.worst_parameter,
            "error": errors.gradient,
            "collectives": result.collectives,
        }


def on_layout(name: str, faults: dict[str, Fault]) -> dict[str, dict[str, object]]:
    """Each fault in both precisions, then each of their cases without it."""
    layout = parse_layout(name, world_size=dist.get_world_size())
    arch = choose_model(layout, None)
    models = {replace(arch, tied=fault.tied) for fault in faults.values()}
    asked = [replace(CASES[f.loss], replay=f.replay) for f in faults.values()]
    wanted = references(models, [], asked, TEMPERATURE)
    stop()
    groups = start(BACKEND, parallel=layout.parallel, seed=1)
    faulty = FaultyLayout(layout=layout, groups=groups, arch=arch, wanted=wanted)
    results = {}
    for dtype in (torch.float64, torch.float32):
        for key, fault in faults.items():
            results[f"{key} {dtype}"] = faulty.step(fault, dtype, fault.patch())
        for fault in {(f.loss, f.split, f.replay, f.share, f.tied): f for f in faults.values()}.values():
            case = f"{name} {fault.loss} {fault.split} {fault.replay} {fault.share} {fault.tied} {dtype}"
            results[f"without: {case}"] = faulty.step(fault, dtype, nullcontext())
    stop()
    return results


def main() -> None:
    out, chosen = Path(sys.argv[1]), {name: FAULTS[name] for name in sys.argv[2:] or FAULTS}
    results = {}
    for name in {fault.layout: None for fault in chosen.values()}:
        join(BACKEND)
        results |= on_layout(name, {key: fault for key, fault in chosen.items() if fault.layout == name})
    join(BACKEND)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    stop()


if __name__ == "__main__":
    main()
