"""``megatron-fspo plan``: a plan as text or JSON, with single changes that make a run fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.plan import GIB, Given, RunPlan, make_plan
from megatron_fspo.lab.plan.presets import find_model
from megatron_fspo.lab.plan.shape import Shape
from megatron_fspo.lab.plan.speed import Machine, fixed_seconds, share_of_peak
from megatron_fspo.packing.zigzag import padded_length
from megatron_fspo.weights import Architecture

_SHOWN = 6  # stages in the table
Changes = Mapping[str, RunPlan]
"""A single change to a run → the plan with it."""


def _single_changes(config: Config, arch: Architecture, given: Given) -> Changes:
    """Return all valid changes: first those that fit, by estimated time, then the others, by memory."""
    changes = {}
    for text, keys, world in _tried(config, given):
        tree = config.model_dump()
        for key, value in keys.items():
            section, _, name = key.partition(".")
            tree[section][name] = value
        try:
            changes[text] = make_plan(Config.model_validate(tree), arch, replace(given, world=world))
        except (ValidationError, InputError):
            continue
    fit = sorted((item for item in changes.items() if not item[1].problems), key=lambda item: item[1].seconds)
    over = sorted(
        (item for item in changes.items() if item[1].problems), key=lambda item: item[1].worst.total
    )
    return dict(fit + over)


def _tried(config: Config, given: Given) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield each change as text and as keys, and its number of ranks."""
    parallel, world, tokens = config.parallel, given.world, config.batch.max_tokens
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    shortest = padded_length(longest, parallel.context)
    changes: list[dict[str, Any]] = []
    if not parallel.distributed_optimizer:
        changes.append({"parallel.distributed_optimizer": True})
    if parallel.tensor > 1 and not parallel.sequence:
        changes.append({"parallel.sequence": True})
    if config.model.recompute == "none":
        changes.append({"model.recompute": "full"})
    sizes = sorted({tokens // 2, shortest})
    changes += [{"batch.max_tokens": size} for size in sizes if shortest <= size < tokens]
    if config.rollout.engine == "embedded":
        changes += [{"rollout.max_batch": config.rollout.max_batch // n} for n in (2, 4, 8)]
    changes.append({"parallel.tensor": 2 * parallel.tensor, "parallel.sequence": True})
    changes += [{f"parallel.{key}": 2 * getattr(parallel, key)} for key in ("pipeline", "context", "expert")]
    for keys in changes:  # json.dumps writes these values as TOML does
        yield ", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()), keys, world
    for more in (2, 4):
        yield f"{more * world} training ranks", {}, more * world


def plan(config: Config, given: Given, *, model: str | None, use_json: bool) -> tuple[str, bool]:
    """Return the text to print, and whether the run fits. ``model`` is a preset or a folder, by default the
    run's checkpoint.

    Raises:
        InputError: the model is unknown, or :func:`make_plan` refuses the run.
    """
    arch = find_model(model or str(config.model.checkpoint))
    made = make_plan(config, arch, given)
    changes = _single_changes(config, arch, given) if made.problems else {}
    if use_json:
        return json.dumps(_as_json(made, changes)), not made.problems
    files = f"checkpoint: {_gib(made.checkpoint)} GiB; Hugging Face export: {_gib(made.export)} GiB"
    servers = [_server(made)] if made.server is not None else []
    blocks = [_head(made), _memory(made), *servers, files, _times(made), _assumptions(made)]
    return "\n\n".join([*blocks, _limits(made, changes)]), not made.problems


def assumed(words: Sequence[str]) -> Machine:
    """Return a :class:`~megatron_fspo.lab.plan.speed.Machine` with some defaults replaced by ``name=value``.

    Raises:
        InputError: a name is unknown, or a value is not a positive number.
    """
    kinds = {name: type(default) for name, default in asdict(Machine()).items()}
    values = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in kinds:
            raise InputError(f"--assume {word}: unknown name; the names are {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            values[name] = 0
        if not 0 < values[name] < float("inf"):
            raise InputError(f"--assume {word}: must be NAME=NUMBER with a positive number")
    return Machine(**values)


def _as_json(plan: RunPlan, changes: Changes) -> dict[str, Any]:
    """Return the plan as JSON types, in bytes and seconds."""
    return {
        "fits": not plan.problems,
        "problems": plan.problems,
        "world": plan.given.world,
        "data": plan.shape.data,
        "room": plan.given.room,
        "stages": [
            {name: getattr(stage, name) for name in ("always", "phases", "nccl", "total")}
            | {"stage": stage.number}
            for stage in plan.stages
        ],
        "servers": plan.work.samplers if plan.server else 0,
        "server": asdict(plan.server) if plan.server else None,
        "memory_phases": plan.memory_phases,
        "checkpoint": plan.checkpoint,
        "export": plan.export,
        "estimate_seconds": {phase.name: phase.parts for phase in plan.phases},
        "assumptions": asdict(plan.given),
        "changes": [
            {
                "change": text,
                "fits": not changed.problems,
                "total": changed.worst.total,
                "estimate_seconds": changed.seconds,
            }
            for text, changed in changes.items()
        ],
        "notes": plan.notes,
    }


def describe_layout(shape: Shape) -> str:
    """Return the layout as text, such as ``tensor 8 × data 4``."""
    names = ("tensor", "pipeline", "context", "expert")
    sizes = {name: getattr(shape.parallel, name) for name in names} | {"data": shape.data}
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def _head(plan: RunPlan) -> str:
    shape, work = plan.shape, plan.work
    packs = " + ".join(f"{n}" for n in work.pack.lengths[:3]) + (" …" if work.pack.lengths[3:] else "")
    arch, values = shape.arch, plan.export / shape.width
    count = f"{values / 1e9:.2f} billion" if values >= 1e9 else f"{values / 1e6:.1f} million"
    return (
        f"{arch.model_type}: {arch.num_layers} layers, hidden size {arch.hidden_size}, {count} parameters\n"
        f"{plan.given.world} ranks ({describe_layout(shape)}), {str(shape.dtype).removeprefix('torch.')}, "
        f"{shape.layers} layers{', FP8' if shape.fp8 else ''}"
        f"{', full recompute' if shape.recompute else ''}\n"
        f"a step: {work.responses} responses, {work.mini_batches * work.epochs} optimizer steps of about "
        f"{work.micro_batches} micro-batches per rank; a full micro-batch: {packs} tokens"
    )


def _memory(plan: RunPlan) -> str:
    stages, last = plan.stages, len(plan.stages) - 1
    if last >= _SHOWN:
        stages = [stages[number] for number in sorted({0, 1, plan.worst.number, last - 1, last})]
    rows = [("memory per rank, GiB", [f"stage {stage.number}" for stage in stages])]
    rows += [(name, [_gib(stage.always[name]) for stage in stages]) for name in stages[0].always]
    for phase in dict.fromkeys(phase for stage in stages for phase in stage.phases):
        columns = [list(stage.phases.get(phase, {}).items()) for stage in stages]
        for row in range(max(map(len, columns))):
            name, *others = dict.fromkeys(column[row][0] for column in columns if column)
            if others:
                name = "on top" if name.startswith("on top") else "activations in flight"
            values = [_gib(column[row][1]) if column else "-" for column in columns]
            rows.append((f"{phase}: {name}", values))
    rows.append(("NCCL", [_gib(stage.nccl) for stage in stages]))
    rows.append((f"total (limit {_gib(plan.given.room)})", [_gib(stage.total) for stage in stages]))
    left = max(len(name) for name, _ in rows)
    lines = [f"{name:<{left}}" + "".join(f"{value:>10}" for value in values) for name, values in rows]
    return "\n".join(lines)


def _server(plan: RunPlan) -> str:
    server, count = plan.server, plan.work.samplers
    assert server is not None
    shared = ""
    if plan.memory_phases:
        held = {"trainer": plan.worst.total} | plan.memory_phases
        listed = ", ".join(f"{phase} {_gib(value)}" for phase, value in held.items())
        shared = f"\n  on the trainer's GPUs; GiB per GPU by phase: {listed} (limit {_gib(plan.given.room)})"
    return (
        f"vLLM servers: {count}, GPUs per server: {server.gpus}; GiB per GPU: weights "
        f"{_gib(server.weights)}, weight update {_gib(server.receiving)}, KV cache {_gib(server.cache)}\n"
        f"  tokens in the cache: {server.cached_tokens}; of requests in flight: up to {server.wanted_tokens}"
        f"{shared}"
    )


def _times(plan: RunPlan) -> str:
    lines = ["seconds per step (estimates, not measured)"]
    for phase in plan.phases:
        parts = ", ".join(f"{name} {_time(value)}" for name, value in phase.parts.items() if value)
        lines.append(f"  {phase.name:<10}{_time(phase.seconds):>8}   {parts or 'nothing to do'}")
    beside = "   the rollout of the next step runs beside training" if plan.work.ahead else ""
    return "\n".join([*lines, f"  {'total':<10}{_time(plan.seconds):>8}{beside}"])


def _assumptions(plan: RunPlan) -> str:
    m, work, given = plan.given.machine, plan.work, plan.given
    share, milliseconds = share_of_peak(plan.shape, m), fixed_seconds(plan.shape, work, m) * 1000
    return (
        f"assumed per GPU: {m.flops / 1e12:g} TFLOP/s × {share:g}; memory {m.memory / 1e12:g} TB/s "
        f"× {m.memory_share:g}; within a node of {m.node} GPUs {m.links / 1e9:g} GB/s × {m.links_share:g},\n"
        f"  between nodes {m.network / 1e9:g} GB/s × {m.network_share:g}; weight updates through a CPU "
        f"{m.host / 1e9:g} GB/s;\n  {milliseconds:.3g} ms per decoding step; mean prompt "
        f"{work.prompt_tokens:g} and mean response {work.response_tokens:g} tokens;\n"
        f"  {given.reserve_gib:g} of {given.gpu_gib:g} GiB for CUDA and fragmentation, "
        f"{given.communicator_gib:g} for each of NCCL's communicators between GPUs"
    )


def _limits(plan: RunPlan, changes: Changes) -> str:
    worst, slowest = plan.worst, max(plan.phases, key=lambda phase: phase.seconds)
    longest = max(slowest.parts, key=lambda name: slowest.parts[name])
    lines = [
        f"bottlenecks: memory of stage {worst.number}, mostly {worst.largest}; estimated time of the "
        f"{slowest.name}, mostly {longest}"
    ]
    lines += [f"note: {note}" for note in plan.notes]
    if not plan.problems:
        return "\n".join([*lines, "the run fits"])
    lines += [f"DOES NOT FIT: {problem}" for problem in plan.problems]
    fitting = [text for text, changed in changes.items() if not changed.problems]
    none = "no single change makes it fit; those that come closest:"
    lines.append(
        "each of these single changes makes it fit (fastest first, by estimate):" if fitting else none
    )
    for text in fitting or list(changes)[:3]:
        changed = changes[text]
        lines.append(f"  {text}: {_gib(changed.worst.total)} GiB, {_time(changed.seconds)} s per step")
    return "\n".join(lines)


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def _time(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
