"""The ``verify`` command: check its arguments, run the plan, print a table and write JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.config import Config
from megatron_fspo.data.hub import find_checkpoint
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.sizes import check_parallel
from megatron_fspo.mcore.machine.transformer_engine import engine_problem
from megatron_fspo.verify.cases import narrow
from megatron_fspo.verify.layouts import Layout, all_layouts, choose_model, on_ranks, parse_layout
from megatron_fspo.verify.run import Result, VerifyPlan, possible_dtypes, verify
from megatron_fspo.weights import read_architecture

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SHORTER = {".weight": "", "self_attn.": "", "layernorm": "norm", "the copy on the last stage": "copy"}


def plan(
    config: Config | None,
    names: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    *,
    use_all: bool,
    world_size: int,
) -> VerifyPlan:
    """Check the arguments before a process group is created; ``InputError`` if they do not fit."""
    if config is None:
        backend = choose_backend("auto", "auto" if engine_problem() is None else "local")
        arch = None
    else:
        backend = choose_backend(config.model.backend, config.model.layers, tensor=config.parallel.tensor)
        full = read_architecture(find_checkpoint(config.model.checkpoint, weights=False))
        check_parallel(full, config.parallel)
        arch = narrow(full)
    listed = names or (config is not None and not use_all)
    if names:
        layouts = [parse_layout(name, world_size=world_size) for name in names]
    elif use_all or config is None:
        layouts = all_layouts(arch, world_size=world_size)
    else:
        recompute = config.model.recompute == "full"
        flags = {"recompute": recompute, "moe": arch is not None and arch.experts is not None}
        flags["lora"] = config.lora.rank > 0
        layouts = [on_ranks("the run's layout", config.parallel, None, world_size=world_size, **flags)]
    for layout in layouts:
        choose_model(layout, arch)
    engine = backend.layers == "transformer_engine"
    if dtypes is None:
        dtypes = ["bfloat16"] if engine else ["float32", "float64"]
    if engine and "float64" in dtypes:
        raise InputError("--dtype float64: Transformer Engine does not support it; set model.layers = local")
    wanted = [_DTYPES[name] for name in dtypes]
    sharded = [layout.name for layout in layouts if not possible_dtypes(layout, wanted)]
    if sharded and listed:
        raise InputError(f"--dtype float64: the distributed optimizer of {sharded[0]} has no float64")
    layouts = [layout for layout in layouts if layout.name not in sharded]
    return VerifyPlan(
        backend=backend,
        arch=arch,
        layouts=layouts,
        dtypes=wanted,
        every_case=bool(listed),
        world_size=world_size,
    )


def run(planned: VerifyPlan, config: Config | None, json_file: Path | None) -> bool:
    """Run the plan, print and write the results; return True if all cases passed. Collective."""
    writer = os.environ.get("RANK", "0") == "0"

    def report(layout: Layout, results: list[Result]) -> None:
        if writer:
            print(lines(layout.name, results), flush=True)

    if writer:
        print(header(), flush=True)
    results = verify(planned, config, report)
    if writer:
        if json_file is not None:
            content = as_json(results, world_size=planned.world_size, collectives=planned.backend.collectives)
            json_file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        print("\n".join(["", *failures(results), summary(results)]), flush=True)
    return not any(result.problems for result in results)


def header() -> str:
    """Return the explanation and column titles of the table."""
    return (
        "Largest errors of each layout against one process in float64, over all losses, splits and models.\n"
        "gradient: relative to the parameter's largest entry; |grad|: relative error of the gradient norm;\n"
        "TP, CP: collectives of head and loss per micro-batch (none without response tokens).\n\n"
        f"{'layout':<36} {'dtype':<9}{'gradient':>9} {'worst parameter':<32}{'log-prob':>9}{'S':>9}"
        f"{'loss':>9}{'|grad|':>9}{'TP':>4}{'CP':>3}  verdict"
    )


def lines(layout: str, results: Sequence[Result]) -> str:
    """Return one table row per precision."""
    table, errors = [], ("log_prob", "log_ratio_sum", "loss", "grad_norm")
    for dtype in dict.fromkeys(result.dtype for result in results):
        rows = [result for result in results if result.dtype == dtype]
        worst = max((row.errors for row in rows), key=lambda errors: errors.gradient)
        short = worst.worst_parameter.removeprefix("model.")
        for long, brief in _SHORTER.items():
            short = short.replace(long, brief)
        failed = sum(bool(row.problems) for row in rows)
        grade = f"{failed} of {len(rows)} FAIL" if failed else f"{len(rows)} pass"
        table.append(
            f"{layout:<36} {_DTYPE_NAMES[dtype]:<9}{worst.gradient:>9.0e} {short:<32}"
            f"{''.join(f'{max(getattr(row.errors, key) for row in rows):>9.0e}' for key in errors)}"
            f"{max(row.collectives['tp'] for row in rows):>4.2g}"
            f"{max(row.collectives['cp'] for row in rows):>3.2g}  {grade}"
        )
    return "\n".join(table)


def failures(results: Sequence[Result]) -> list[str]:
    """Return the problems of the first ten failed cases."""
    failed = [result for result in results if result.problems]
    texts = [
        f"{result.layout}, {_DTYPE_NAMES[result.dtype]}, {result.case.name}, {result.case.split}"
        f"{', tied' if result.tied else ''}:\n" + "\n".join(f"  {problem}" for problem in result.problems)
        for result in failed[:10]
    ]
    return texts + ([f"… and {len(failed) - 10} more; see all with --json"] if len(failed) > 10 else [])


def summary(results: Sequence[Result]) -> str:
    """Return one line, which names the worst parameter if a case failed."""
    failed = [result for result in results if result.problems]
    layouts = len({result.layout for result in results})
    if not failed:
        return f"{layouts} layouts, {len(results)} cases: the same gradient in all of them"
    worst = max(failed, key=lambda result: result.errors.gradient)
    return (
        f"{len(failed)} of {len(results)} cases FAILED; worst parameter {worst.errors.worst_parameter} "
        f"(relative error {worst.errors.gradient:.1e}, layout {worst.layout}, {worst.case.name})"
    )


def as_json(results: Sequence[Result], *, world_size: int, collectives: str) -> dict[str, Any]:
    """Return every case, with package versions."""
    return {
        "world_size": world_size,
        "collectives": collectives,
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "passed": not any(result.problems for result in results),
        "cases": [
            {
                "layout": result.layout,
                "dtype": _DTYPE_NAMES[result.dtype],
                "tied": result.tied,
                "loss": result.case.name,
                "split": result.case.split,
                "gradient_error": result.errors.gradient,
                "parameter": result.errors.worst_parameter,
                "log_prob_error": result.errors.log_prob,
                "log_ratio_sum_error": result.errors.log_ratio_sum,
                "loss_error": result.errors.loss,
                "grad_norm": result.grad_norm,
                "grad_norm_error": result.errors.grad_norm,
                "tp_collectives": result.collectives["tp"],
                "cp_collectives": result.collectives["cp"],
                "problems": result.problems,
            }
            for result in results
        ],
    }
