"""Writes docs/plan.md from the plan's own code: ``make docs``."""

# ruff: noqa: E501 (a row of a table is a line)

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.plan.activations import layer_tensors
from megatron_fspo.lab.plan.command import layout_of, plan
from megatron_fspo.lab.plan.plan import GIB, ROUTES, Given, RunPlan, make_plan
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.lab.plan.shape import PlannedPack
from megatron_fspo.lab.plan.state import server_gpus

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(__file__).with_name("plan.md")
FILES = [ROOT / "examples/qwen3_8b" / name for name in ("run.toml", "four_nodes.toml")]
RESULTS = ROOT / "benchmarks/results/plan_memory.json"
TRACES = ROOT / "benchmarks/results/trace_layouts.json"
GPUS = (64, 128, 256, 512, 1024)
LARGE = {
    "qwen3-32b": "--parallel.tensor 8",
    "qwen3-235b-a22b": "--parallel.tensor 4 --parallel.pipeline 2 --parallel.expert {expert} "
    "--model.recompute full",
}

HEAD = """\
# What a run takes, on paper

`megatron-fspo plan` says before a run how much memory each rank needs, how large checkpoints are, and about
how long a step lasts. It needs no GPU, no job and no checkpoint: `--model` takes a published shape in place of one, or a
folder with a `config.json`. The shapes are {presets}. Made by `make docs`.

```
megatron-fspo plan --config examples/qwen3_8b/run.toml --model qwen3-8b --nproc 8
```

```text
{sample}
```

Exit status 0: it fits; 1: it does not, and single changes that would are listed; 2: bad input. `--json` prints all
of it as one line, in bytes and seconds. Any key of the configuration is an argument, as for `train`;
`--gpu-memory`, `--reserve`, `--mean-prompt`, `--mean-response`, `--server-gpus` and `--assume` change what is
assumed. `--nproc` counts the ranks that train, `--servers` the vLLM servers: without it as many as `vllm.urls`
names, or one with `vllm.discovery`.

## What is counted

| what | how | checked |
|---|---|---|
| parameters, gradients, optimizer | shapes from [the weights' table](../megatron_fspo/weights/table.py), cut by the layout, laid out as Megatron's buffers with their padding; fp32 gradients and moments, fp32 masters in bf16 | equal to what real ranks hold |
| checkpoint | the same tensors once, the vocabulary padded | equal to a saved one |
| activations | tensor by tensor, below; times the micro-batches that a stage has under way | within 10% on a CPU, local layers; on GPUs by [traces](#beside-the-step-without-a-gpu) |
| experts | as many tokens as if routers spread them evenly: k copies of each are kept at their expert, three more are on their way at a time; a note says what twice the share costs a rank | by traces |
| experts of each token | a byte for each of k experts in each layer of the stage, for all tokens of a step: the old pass leaves them to the updates | no |
| on top | the largest of: a layer's backward, the head's forward and backward, the embedding's backward (a tied table has two gradients and their sum) | within 10%, local layers |
| KV cache of the embedded engine | `rollout.max_batch` rows, all as long as the longest | equal |
| weights on their way to servers | two buckets of 256 MiB, and the next parameter in parts and whole | within 10% |
| FP8 copies of weights | one byte a value, by row and by column | by traces |
| vLLM's servers | from reading | no |
| `--reserve`: CUDA, NCCL, workspaces, fragments | a guess | no |

The update, sampling by the embedded engine and sending weights do not come together: the total is what is held
always and the largest of them. A micro-batch is a full one, of the longest sequences. What a kernel or a
collective allocates for itself is in the reserve.

## Activations of a layer

KiB per token of one layer of Qwen3-8B in bf16 on one rank with a GPU: what modules of Megatron and Transformer Engine keep in a
[trace](without_a_gpu.md). One H200 took 0.6% more than planned in a step of 8 layers ([results](../benchmarks/results/gpu_h200.md)). On a CPU, where norms are no single kernels, local layers keep twice as much.

| | local | Transformer Engine |
|---|---|---|
{tensors}

Tensor parallel divides heads and F, sequence parallel what lies between, context parallel the tokens. Full
recompute keeps the input of each layer, and all of one layer at a time.

## Beside measurement

`python benchmarks/plan_memory.py` runs one optimizer step's forward and backward through the trainer's code, on gloo, with
all layers of SmolLM2-135M and of a random model of the shape of Qwen3-0.6B, and counts the bytes of every
tensor ([results](../benchmarks/results/plan_memory.json)). *held*: the most between forward and backward.
`tests/plan` does the same with four layers in every layout, and compares parameters, gradients,
optimizer, checkpoint and KV cache of small models for equality.

| model | layout | held, MiB | planned | peak, MiB | planned | worst rank, held | peak |
|---|---|---|---|---|---|---|---|
{measured}

## Beside the step without a GPU

`python benchmarks/trace_layouts.py` has the trainer's own code take the step of each shipped layout [without a GPU](without_a_gpu.md),
with all layers ([results](../benchmarks/results/trace_layouts.json)). Most that a rank holds in an update, beside the plan; then per
micro-batch of an update arithmetic, operations that are no views, and waits of the host (those once an optimizer step shared out over
its two micro-batches here); and what a rank sends in an optimizer step.

| layout | traced, GiB | planned | difference | TFLOP | operations | waits | sent, GiB |
|---|---|---|---|---|---|---|---|
{traced}

## Times

Estimates, of which nothing was measured: a phase takes its arithmetic, or its reading of memory, and all its messages, none of
them hidden. Peaks are those of the H100's datasheet (989 TFLOP/s in bf16, 3.35 TB/s, NVLink 450 GB/s one way) and of a
400 Gb/s adapter per GPU; how much of them is reached is assumed, and printed. Short kernels, uneven packs and experts,
rewards, evaluation and checkpoints are not in it. Use them to compare layouts, not to book a cluster.

## Qwen3-32B and Qwen3-235B-A22B

`python docs/make_plan.py`: the configurations [run.toml](../examples/qwen3_8b/run.toml) and
[four_nodes.toml](../examples/qwen3_8b/four_nodes.toml) with 1,024 prompts a step. Half of the GPUs train, the others
sample; 80 GiB, 6 of them in reserve. Of the mixture's worst rank the experts of each token are {routes} GiB, from the smallest
job to the largest. Twice its share of tokens costs it {uneven} GiB.

| model | GPUs | layout of those that train | worst rank, GiB | fits 74 | checkpoint, GiB | rollout, s (estimate) | old pass | update | sync |
|---|---|---|---|---|---|---|---|---|---|
{large}
"""


def render() -> str:
    """The page."""
    text, _ = plan(load_config(FILES[0]), Given(world=8), model="qwen3-8b", use_json=False)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return HEAD.format(
        presets=", ".join(f"`{name}`" for name in PRESETS),
        sample=text,
        tensors="\n".join(_tensors()),
        measured="\n".join(_measured(row) for row in rows),
        traced="\n".join(_traced()),
        large="\n".join(_large()),
        **_mixture(),
    )


def _tensors() -> Iterator[str]:
    config = load_config(FILES[0], ["--parallel.tensor", "1", "--parallel.sequence", "false"])
    shape = make_plan(config, PRESETS["qwen3-8b"], Given(world=1)).shape
    pack = PlannedPack(lengths=(1024,), scored=1024)
    found = layer_tensors(shape, pack)
    for tensor in found:
        yield f"| {tensor.what} | {_kib(tensor.local)} | {_kib(tensor.transformer_engine)} |"
    local, fused = (sum(getattr(t, name) for t in found) for name in ("local", "transformer_engine"))
    yield f"| **all** | **{_kib(local)}** | **{_kib(fused)}** |"


def _kib(value: float) -> str:
    """Of 1,024 tokens, for one."""
    return f"{value / 2**20:.2f}" if value else "–"


def _measured(row: dict[str, float]) -> str:
    sizes = [row[f"{name}_{kind}"] / 2**20 for name in ("held", "peak") for kind in ("measured", "planned")]
    cells = [f"{size:,.1f}" for size in sizes]
    ratios = [f"{row[f'{name}_worst_ratio']:.3f}" for name in ("held", "peak")]
    return "| " + " | ".join([str(row["model"]), str(row["layout"]), *cells, *ratios]) + " |"


def _traced() -> Iterator[str]:
    for name, row in json.loads(TRACES.read_text(encoding="utf-8"))["rows"].items():
        peak, planned = row["peak"] / GIB, row["planned"] / GIB
        cells = [name, f"{peak:.2f}", f"{planned:.2f}", f"{planned / peak - 1:+.1%}"]
        cells += [f"{row['flops'] / 1e12:.1f}", f"{row['launches']:,.0f}", f"{row['syncs']:g}"]
        yield f"| {' | '.join(cells)} | {row['sent'] / GIB:.2f} |"


def _large() -> Iterator[str]:
    for model, layout in LARGE.items():
        for gpus in GPUS:
            yield _row(model, gpus, _plan_of(model, layout, gpus))


def _mixture() -> dict[str, str]:
    model = "qwen3-235b-a22b"
    worst = [_plan_of(model, LARGE[model], gpus).worst for gpus in GPUS]
    routes = [stage.phases["update"][ROUTES] / GIB for stage in worst]
    uneven = {f"{stage.uneven / GIB:.1f}" for stage in worst}
    return {"routes": ", ".join(f"{size:.1f}" for size in routes), "uneven": " to ".join(sorted(uneven))}


def _plan_of(model: str, layout: str, gpus: int) -> RunPlan:
    train = gpus // 2
    arch = PRESETS[model]
    servers = train // server_gpus(arch, width=2, memory=80 * GIB)
    words = layout.format(expert=min(64, train // 2)).split()
    words += ["--parallel.sequence", "true", "--rollout.prompts", "1024"]
    return make_plan(load_config(FILES, words), arch, Given(world=train, servers=servers))


def _row(model: str, gpus: int, plan: RunPlan) -> str:
    layout = layout_of(plan.shape) + (", recompute" if plan.shape.recompute else "")
    seconds = [f"{phase.seconds:,.0f}" for phase in plan.phases]
    memory, checkpoint = f"{plan.worst.total / GIB:.1f}", f"{plan.checkpoint / GIB:,.0f}"
    cells = [model, f"{gpus:,}", layout, memory, "no" if plan.problems else "yes", checkpoint, *seconds]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
