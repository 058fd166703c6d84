"""On every rank: a training step under each fault, and what ``verify`` says of it; the same without faults.

faults_worker.py OUT [FAULT...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from faults import FAULTS
from patching import Fault, Patch

from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.startup import join, start, stop
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import share
from megatron_fspo.verify.cases import (
    SMALL,
    TEMPERATURE,
    Case,
    cases,
    drifts,
    make_samples,
    random_weights,
    with_layers,
)
from megatron_fspo.verify.compare import LIMITS, compare
from megatron_fspo.verify.diagnose import problems
from megatron_fspo.verify.layouts import Layout, parse_layout
from megatron_fspo.verify.production import build, run, score
from megatron_fspo.verify.reference import Reference, forward, reference
from megatron_fspo.weights import Architecture

BACKEND = choose_backend("cpu")
CASES = {case.name: case for case in cases(None, 0)}
SAMPLES = make_samples(SMALL)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A layout with the references of its models."""

    layout: Layout
    groups: ParallelGroups
    arch: Architecture
    wanted: dict[tuple[bool, str], Reference]
    """By tied and loss."""

    def step(self, fault: Fault, dtype: torch.dtype, patch: Patch) -> dict[str, object]:
        """One training step with the patch, and what is said of it."""
        model = replace(self.arch, tied=fault.tied)
        want = self.wanted[fault.tied, fault.loss]
        case = replace(CASES[fault.loss], split=fault.split)
        with patch:
            policy = build(self.layout, model, random_weights(model), BACKEND, self.groups, dtype)
            scored = score(policy, case.split, SAMPLES, TEMPERATURE)
            outcome = run(policy, case, scored, SAMPLES, policy_drifts(case), reference_drifts())
        errors = compare(policy, outcome, want)
        found = problems(outcome, want, errors, LIMITS[dtype], self.layout)
        return {"problems": found, "parameter": errors.worst_parameter, "error": errors.gradient}


def policy_drifts(case: Case) -> list[torch.Tensor]:
    return drifts(SAMPLES, seed=3, clipped=case.clipped)


def reference_drifts() -> list[torch.Tensor]:
    return drifts(SAMPLES, seed=4)


def references(arch: Architecture, faults: Sequence[Fault]) -> dict[tuple[bool, str], Reference]:
    """What the faults' losses must be, computed on rank 0."""
    found: dict[tuple[bool, str], Reference] = {}
    for tied in sorted({fault.tied for fault in faults}) if dist.get_rank() == 0 else ():
        model = replace(arch, tied=tied)
        weights = {name: w.double().requires_grad_() for name, w in random_weights(model).items()}
        scores = forward(weights, model, SAMPLES, TEMPERATURE)
        for case in {fault.loss: CASES[fault.loss] for fault in faults if fault.tied == tied}.values():
            penalty = {"ref_drifts": reference_drifts(), "kl_coef": case.loss.kl_coef}
            found[tied, case.name] = reference(
                scores, case.loss, policy_drifts(case), **penalty if case.loss.kl_coef else {}
            )
    return share(found, group=dist.group.WORLD)


def on_layout(name: str, faults: dict[str, Fault]) -> dict[str, dict[str, object]]:
    """Each fault in both precisions, then each of their cases without it."""
    layout = parse_layout(name, world_size=dist.get_world_size())
    arch = with_layers(SMALL, layout.parallel)
    wanted = references(arch, list(faults.values()))
    stop()
    groups = start(BACKEND, parallel=layout.parallel, seed=1)
    place = Place(layout=layout, groups=groups, arch=arch, wanted=wanted)
    found = {}
    for dtype in (torch.float64, torch.float32):
        for key, fault in faults.items():
            found[f"{key} {dtype}"] = place.step(fault, dtype, fault.patch())
        for fault in {(f.loss, f.split, f.tied): f for f in faults.values()}.values():
            case = f"{name} {fault.loss} {fault.split} {fault.tied} {dtype}"
            found[f"without: {case}"] = place.step(fault, dtype, nullcontext())
    stop()
    return found


def main() -> None:
    out, chosen = Path(sys.argv[1]), {name: FAULTS[name] for name in sys.argv[2:] or FAULTS}
    found = {}
    for name in {fault.layout: None for fault in chosen.values()}:
        join(BACKEND)
        found |= on_layout(name, {key: fault for key, fault in chosen.items() if fault.layout == name})
    join(BACKEND)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    stop()


if __name__ == "__main__":
    main()
