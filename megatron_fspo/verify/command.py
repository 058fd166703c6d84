"""The command: what to verify on this machine, and the printing of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_fspo.config import Config, Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.backend import Backend, choose_backend
from megatron_fspo.mcore.engine import engine_problem
from megatron_fspo.mcore.sizes import check_parallel, check_trainable
from megatron_fspo.verify import table
from megatron_fspo.verify.cases import SMALL, narrow, with_layers
from megatron_fspo.verify.layouts import Layout, all_layouts, parse_layout
from megatron_fspo.verify.run import Result, possible_dtypes, verify
from megatron_fspo.weights import Architecture, read_architecture

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is verified."""

    backend: Backend
    arch: Architecture
    layouts: list[Layout]
    dtypes: list[torch.dtype]
    every_case: bool
    world_size: int


def plan(
    config: Config | None,
    names: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    *,
    use_all: bool,
    world_size: int,
) -> Plan:
    """Read and check the arguments, before a process group forms.

    Raises:
        InputError: a layout that does not fit the ranks or the model.
    """
    if config is None:
        backend = choose_backend("auto", "auto" if engine_problem() is None else "local")
        arch = SMALL
    else:
        backend = choose_backend(config.model.backend, config.model.layers)
        full = read_architecture(config.model.checkpoint)
        check_trainable(full)
        check_parallel(full, config.parallel)
        arch = narrow(full)
    listed = names or (config is not None and not use_all)
    if names:
        layouts = [parse_layout(name, world_size=world_size) for name in names]
    elif use_all or config is None:
        layouts = all_layouts(arch, world_size=world_size)
    else:
        layouts = [_layout_of(config, world_size)]
    for layout in layouts:
        check_parallel(with_layers(arch, layout.parallel), layout.parallel)
    engine = backend.layers == "transformer_engine"
    if dtypes is None:
        dtypes = ["bfloat16"] if engine else ["float32", "float64"]
    if engine and "float64" in dtypes:
        raise InputError("--dtype float64: Transformer Engine has no float64; model.layers = local has")
    wanted = [_DTYPES[name] for name in dtypes]
    sharded = [layout.name for layout in layouts if not possible_dtypes(layout, wanted)]
    if sharded and listed:
        raise InputError(f"--dtype float64: {sharded[0]} has a distributed optimizer, which knows no float64")
    layouts = [layout for layout in layouts if layout.name not in sharded]
    return Plan(
        backend=backend,
        arch=arch,
        layouts=layouts,
        dtypes=wanted,
        every_case=bool(listed),
        world_size=world_size,
    )


def run(planned: Plan, config: Config | None, json_file: Path | None) -> bool:
    """Verify and print; whether all passed. Collective."""
    writer = os.environ.get("RANK", "0") == "0"

    def report(layout: Layout, results: list[Result]) -> None:
        if writer:
            print(table.lines(layout.name, results), flush=True)

    if writer:
        print(table.header(), flush=True)
    results = verify(
        planned.layouts,
        planned.backend,
        planned.dtypes,
        config=config,
        arch=planned.arch,
        every_case=planned.every_case,
        report=report,
    )
    if writer:
        if json_file is not None:
            as_json = table.as_json(
                results, world_size=planned.world_size, collectives=planned.backend.collectives
            )
            json_file.write_text(json.dumps(as_json, indent=1), encoding="utf-8")
        print("\n".join(["", *table.failures(results), table.verdict(results)]), flush=True)
    return not any(result.problems for result in results)


def _layout_of(config: Config, world_size: int) -> Layout:
    parallel: Parallel = config.parallel
    data, rest = divmod(world_size, parallel.model_size)
    if rest:
        raise InputError(
            f"the run's layout is for a multiple of {parallel.model_size} ranks, not {world_size}"
        )
    return Layout(parallel=parallel, data=data, recompute=config.model.recompute == "full")
