"""A plan as text, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_fspo.lab.plan.advice import Change
from megatron_fspo.lab.plan.report import GIB, Report, Stage
from megatron_fspo.lab.plan.shape import Shape

_SHOWN = 6  # stages side by side


def as_text(report: Report, changes: Sequence[Change]) -> str:
    """Everything, for a person."""
    blocks = [_head(report), _memory(report), _files(report)]
    if report.server is not None:
        blocks.insert(2, _server(report))
    blocks += [_times(report), _assumptions(report), _limits(report, changes)]
    return "\n\n".join(blocks)


def as_json(report: Report, changes: Sequence[Change]) -> dict[str, Any]:
    """The same for a program: bytes and seconds."""
    given = asdict(report.given)
    return {
        "fits": not report.problems,
        "problems": report.problems,
        "world": report.given.world,
        "data": report.shape.data,
        "room": report.given.room,
        "stages": [
            {"stage": stage.number, "always": stage.always, "phases": stage.phases, "total": stage.total}
            for stage in report.stages
        ],
        "servers": report.samplers.count if report.server else 0,
        "server": asdict(report.server) if report.server else None,
        "turns": report.turns,
        "checkpoint": report.checkpoint,
        "export": report.export,
        "estimate_seconds": {phase.name: phase.parts for phase in report.phases},
        "assumptions": given,
        "changes": [
            {
                "change": change.text,
                "fits": not change.report.problems,
                "total": change.report.worst.total,
                "estimate_seconds": change.report.seconds,
            }
            for change in changes
        ],
        "notes": report.notes,
    }


def layout_of(shape: Shape) -> str:
    """In words."""
    parallel = shape.parallel
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context,
             "expert": parallel.expert, "data": shape.data}  # fmt: skip
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def _head(report: Report) -> str:
    shape, work = report.shape, report.work
    packs = " + ".join(f"{n}" for n in work.pack.lengths[:3]) + (" …" if work.pack.lengths[3:] else "")
    arch = shape.arch
    return (
        f"{arch.model_type}, {arch.num_layers} layers of {arch.hidden_size}: {_count(report)} parameters\n"
        f"{report.given.world} ranks ({layout_of(shape)}), {str(shape.dtype).removeprefix('torch.')}, "
        f"layers of {shape.layers}{', FP8' if shape.fp8 else ''}"
        f"{', full recompute' if shape.recompute else ''}\n"
        f"a step: {work.responses} responses, {work.mini_batches * work.epochs} optimizer steps of about "
        f"{work.micro_batches} micro-batches a rank; a full one: {packs} tokens"
    )


def _count(report: Report) -> str:
    values = report.export / report.shape.width
    return f"{values / 1e9:.2f} billion" if values >= 1e9 else f"{values / 1e6:.1f} million"


def _memory(report: Report) -> str:
    stages = _chosen(report)
    rows: list[tuple[str, list[str]]] = [
        ("memory of a rank, GiB", [f"stage {stage.number}" for stage in stages])
    ]
    for name in stages[0].always:
        rows.append((name, [_gib(stage.always[name]) for stage in stages]))
    for phase in dict.fromkeys(phase for stage in stages for phase in stage.phases):
        columns = [list(stage.phases.get(phase, {}).items()) for stage in stages]
        for place in range(max(map(len, columns))):
            names = dict.fromkeys(column[place][0] for column in columns if column)
            values = [_gib(column[place][1]) if column else "-" for column in columns]
            rows.append((f"{phase}: {_shared(list(names))}", values))
    rows.append((f"total, of {_gib(report.given.room)}", [_gib(stage.total) for stage in stages]))
    left = max(len(name) for name, _ in rows)
    lines = [f"{name:<{left}}" + "".join(f"{value:>10}" for value in values) for name, values in rows]
    return "\n".join(lines)


def _shared(names: list[str]) -> str:
    """One name for a row whose columns differ in it."""
    if len(names) == 1:
        return names[0]
    return "on top" if names[0].startswith("on top") else "activations under way"


def _chosen(report: Report) -> list[Stage]:
    """All stages, or the first, the last and the largest of many."""
    if len(report.stages) <= _SHOWN:
        return report.stages
    numbers = {0, 1, report.worst.number, len(report.stages) - 2, len(report.stages) - 1}
    return [report.stages[number] for number in sorted(numbers)]


def _server(report: Report) -> str:
    found, count = report.server, report.samplers.count
    assert found is not None
    turns = ""
    if report.turns:
        held = {"trainer": report.worst.total} | report.turns
        parts = ", ".join(f"of the {turn} {_gib(value)}" for turn, value in held.items())
        turns = f"\n  on the trainer's GPUs, in turns: {parts} of {_gib(report.given.room)}"
    return (
        f"vLLM servers: {count}, GPUs of each: {found.gpus}; GiB of a GPU: weights {_gib(found.weights)}, "
        f"an update {_gib(found.receiving)}, KV cache {_gib(found.cache)}\n"
        f"  the cache holds {found.cached_tokens} tokens; all that may be in flight: {found.wanted_tokens}"
        f"{turns}"
    )


def _files(report: Report) -> str:
    return f"a checkpoint: {_gib(report.checkpoint)} GiB; the Hugging Face export: {_gib(report.export)} GiB"


def _times(report: Report) -> str:
    lines = ["seconds of a step: an estimate, nothing of it measured"]
    for phase in report.phases:
        parts = ", ".join(f"{name} {_time(value)}" for name, value in phase.parts.items() if value)
        parts = parts or "nothing to do"
        lines.append(f"  {phase.name:<10}{_time(phase.seconds):>8}   {parts}")
    return "\n".join([*lines, f"  {'all':<10}{_time(report.seconds):>8}"])


def _assumptions(report: Report) -> str:
    m, work, given = report.given.machine, report.work, report.given
    return (
        f"assumed: {m.flops / 1e12:g} TFLOP/s x {m.flops_share:g}; memory {m.memory / 1e12:g} TB/s x "
        f"{m.memory_share:g}; in a node of {m.node} {m.links / 1e9:g} GB/s x {m.links_share:g},\n"
        f"  between nodes {m.network / 1e9:g} GB/s x {m.network_share:g} a GPU; through a CPU "
        f"{m.host / 1e9:g} GB/s;\n  {m.decoding_seconds * 1000:g} ms a decoding step; prompts of "
        f"{work.prompt_tokens:g} and responses of {work.response_tokens:g} tokens on average;\n"
        f"  {given.reserve_gib:g} of {given.gpu_gib:g} GiB for CUDA, NCCL and fragments"
    )


def _limits(report: Report, changes: Sequence[Change]) -> str:
    worst, slowest = report.worst, max(report.phases, key=lambda phase: phase.seconds)
    part = max(slowest.parts, key=lambda name: slowest.parts[name])
    lines = [
        f"limits: memory of stage {worst.number}, most of it {worst.largest}; time (estimate) of the "
        f"{slowest.name}, most of it {part}"
    ]
    lines += [f"note: {note}" for note in report.notes]
    if not report.problems:
        return "\n".join([*lines, "it fits"])
    lines += [f"DOES NOT FIT: {problem}" for problem in report.problems]
    fitting = [change for change in changes if not change.report.problems]
    if fitting:
        lines.append("any one of these would fit (the fastest first, by estimate):")
    else:
        lines.append("no single change that was tried fits; the smallest are:")
    lines += [
        f"  {change.text}: {_gib(change.report.worst.total)} GiB, a step of {_time(change.report.seconds)} s"
        for change in (fitting or list(changes)[:3])
    ]
    return "\n".join(lines)


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def _time(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
