"""Writes docs/plan.md from the plan's own code: ``make docs``."""

# ruff: noqa: E501 (a row of a table is a line)

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.plan.activations import layer_tensors
from megatron_fspo.lab.plan.command import describe_layout, plan
from megatron_fspo.lab.plan.plan import GIB, Given, RunPlan, make_plan
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.lab.plan.shape import PlannedPack
from megatron_fspo.lab.plan.state import server_gpus

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(__file__).with_name("plan.md")
FILES = [ROOT / "examples/qwen3_8b" / name for name in ("run.toml", "four_nodes.toml")]
RESULTS = ROOT / "benchmarks/results/plan_memory.json"
TRACES = ROOT / "benchmarks/results/trace_layouts.json"
GPUS = (64, 128, 256, 1024)
PHASES = ("rollout", "old pass", "update")
LARGE = {
    "qwen3-32b": "--parallel.tensor 8",
    "qwen3-235b-a22b": "--parallel.tensor 4 --parallel.pipeline 2 --parallel.expert {expert} "
    "--model.recompute full",
}

SHAPE = "--rollout.prompts 64 --rollout.samples 32 --data.max_prompt_tokens 512 --rollout.max_response_tokens 3584"
SHAPE += " --batch.mini_batches 4 --batch.max_tokens 8192 --loss.kl_coef 0.01 --vllm.colocated true --vllm.transfer gloo"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step that others have timed on H100s: GRPO with 2,048 responses, four optimizer steps, and log-probs of a
    reference model, on GPUs that also sample. A prompt is assumed to have 100 tokens."""

    model: str
    gpus: int
    server_gpus: int
    tokens: int
    """Mean tokens of a response."""
    layout: str
    seconds: float

    def plan(self) -> RunPlan:
        words = f"{SHAPE} {self.layout}".split()
        given = Given(
            world=self.gpus,
            servers=self.gpus // self.server_gpus,
            server_gpus=self.server_gpus,
            mean_prompt=100,
            mean_response=self.tokens,
            server_share=0.8,
        )
        return make_plan(load_config(FILES, words), PRESETS[self.model], given)


PUBLISHED = [
    # NeMo-RL#959, rollout 58, log-probs 18, training 28, weights 5; then NeMo-RL's docs/about/performance-summary.md
    # for its version 0.4, on-policy, whose lengths include the prompt.
    Published(
        model="llama-3.1-8b", gpus=8, server_gpus=1, tokens=795, seconds=112,
        layout="--parallel.tensor 1 --parallel.sequence false --parallel.pipeline 2",
    ),
    Published(
        model="llama-3.1-8b", gpus=16, server_gpus=1, tokens=960, seconds=97.7,
        layout="--parallel.tensor 1 --parallel.sequence false --parallel.pipeline 2",
    ),
    Published(
        model="qwen3-32b", gpus=32, server_gpus=4, tokens=3106, seconds=393,
        layout="--parallel.tensor 4 --parallel.sequence true --parallel.pipeline 4",
    ),
    Published(
        model="qwen3-30b-a3b", gpus=32, server_gpus=4, tokens=3054, seconds=225,
        layout="--parallel.tensor 2 --parallel.sequence true --parallel.expert 8",
    ),
]  # fmt: skip

HEAD = """\
# Plan

For anyone who wants to know before booking GPUs whether a run fits and about how long a step takes. `make docs` makes this page.

```
megatron-fspo plan --config examples/qwen3_8b/run.toml --model qwen3-8b --nproc 8
```

```text
{sample}
```

`plan` needs no GPU and no checkpoint. `--model` takes a folder with a `config.json` or a published shape:
{presets}.

| option | meaning |
|---|---|
| `--nproc` | ranks that train |
| `--servers`, `--server-gpus` | vLLM servers (default: as many as `vllm.urls` names, or one with `vllm.discovery`), and GPUs of each |
| `--gpu-memory`, `--reserve` | GiB of a GPU (default 80), and of these for CUDA and fragments (default 4) |
| `--mean-prompt`, `--mean-response` | average tokens (default: half of the longest) |
| `--assume NAME=NUMBER` | speeds; `--assume ?` lists them |
| `--section.key value` | any key of the configuration |
| `--json` | bytes and seconds, for programs |
| `--trace RANK`, `--trace all` | runs the step of a rank, or compares all, [without a GPU](without_a_gpu.md) |

The exit status is 0 if the run fits, 1 if it does not (then `plan` lists single changes that would), and 2 for bad input.

## What is counted

- **Parameters, gradients, optimizer, checkpoint**: exact. Tests compare them with real ranks and saved checkpoints.
- **Activations**: tensor by tensor, for full micro-batches of the longest sequences. A layer of Qwen3-8B in bf16 keeps {fused} KiB per token with
  Transformer Engine's layers and {local} with local ones on a GPU.
- **On top** of them: the largest of a layer's backward, the head, and the embedding's backward.
- **Experts**: tokens spread evenly; a note says what twice the share costs a rank.
- **Sampling and weight updates**: the embedded engine's KV cache for `rollout.max_batch` full responses, and two buckets of 256 MiB. Training,
  sampling and updates never overlap: the total has the largest.
- **NCCL**: 1.25 GiB for each communicator of a step, assumed from verl's issue 6408; the reserve and **vLLM servers** are assumed, too.

## Accuracy

`python benchmarks/plan_memory.py` runs the forward and backward passes of an optimizer step on CPUs, with all layers of SmolLM2-135M and of a
random Qwen3-0.6B, in {layouts} layouts. The planned peaks are {lowest} to {highest} times the measured ones on the worst rank
([results](../benchmarks/results/plan_memory.json)).

`python benchmarks/trace_layouts.py` traces a step of these layouts [without a GPU](without_a_gpu.md). Peak memory of an update
([results](../benchmarks/results/trace_layouts.json)):

| layout | traced, GiB | planned, GiB | difference |
|---|---|---|---|
{traced}

Steps of 8 layers on one H200 took 0.4 to 0.9% more memory than planned ([results](../benchmarks/results/gpu_h200.md)).

**Times are estimates.** A phase takes its arithmetic or memory reads plus all its messages, without overlap, at assumed
shares of an H100's datasheet speeds. FP8's factor and the embedded sampler's steps are the H200's; its bf16 passes reached 0.58 of the peak, not 0.4. Short kernels, uneven packs, rewards, evaluation and checkpoints are left out. [NeMo-RL](https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md) has published GRPO steps of 2,048 responses on H100s (the
first in its issue 959); `PUBLISHED` in `docs/make_plan.py` plans them:

| model | GPUs | tokens | published, s | planned, s |
|---|---|---|---|---|
{published}

Use them to compare layouts.

## Qwen3-32B and Qwen3-235B-A22B

[run.toml](../examples/qwen3_8b/run.toml) with [four_nodes.toml](../examples/qwen3_8b/four_nodes.toml) and 1,024 prompts per step; half of the 80 GB
GPUs train. Checkpoints have {checkpoints} GiB. A rank with twice its share of the mixture's tokens needs {uneven} GiB more. Seconds are estimates.

| model | GPUs | layout of those that train | worst rank, GiB of 76 | fits | rollout, s | old pass, s | update, s |
|---|---|---|---|---|---|---|---|
{large}

**Next**: [performance](performance.md), [parallelism](parallelism.md), [clusters](cluster.md).
"""


def render() -> str:
    """The page."""
    text, _ = plan(load_config(FILES[0]), Given(world=8), model="qwen3-8b", use_json=False)
    ratios = [row["peak_worst_ratio"] for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]]
    plans = [(model, gpus, _plan_of(model, layout, gpus)) for model, layout in LARGE.items() for gpus in GPUS]
    return HEAD.format(
        presets=", ".join(f"`{name}`" for name in PRESETS),
        sample=text,
        layouts=len(ratios),
        lowest=f"{min(ratios):.3f}",
        highest=f"{max(ratios):.3f}",
        traced="\n".join(_traced()),
        published="\n".join(map(_published, PUBLISHED)),
        checkpoints=" and ".join(dict.fromkeys(f"{plan.checkpoint / GIB:,.0f}" for _, _, plan in plans)),
        uneven=" to ".join(
            sorted({f"{plan.worst.uneven / GIB:.1f}" for _, _, plan in plans if plan.worst.uneven})
        ),
        large="\n".join(_row(*one) for one in plans),
        **_of_a_layer(),
    )


def _of_a_layer() -> dict[str, str]:
    """KiB that a layer keeps per token, from a pack of 1,024."""
    config = load_config(FILES[0], ["--parallel.tensor", "1", "--parallel.sequence", "false"])
    shape = make_plan(config, PRESETS["qwen3-8b"], Given(world=1)).shape
    found = layer_tensors(shape, PlannedPack(lengths=(1024,), scored=1024))
    names = {"local": "local", "fused": "transformer_engine"}
    return {name: f"{sum(getattr(one, kind) for one in found) / 2**20:.0f}" for name, kind in names.items()}


def _traced() -> Iterator[str]:
    for name, row in json.loads(TRACES.read_text(encoding="utf-8"))["rows"].items():
        peak, planned = row["peak"] / GIB, row["planned"] / GIB
        yield f"| {name} | {peak:.2f} | {planned:.2f} | {planned / peak - 1:+.1%} |"


def _published(step: Published) -> str:
    plan = step.plan()
    return f"| {step.model} | {step.gpus} | {step.tokens:,} | {step.seconds:g} | {plan.seconds:.0f} |"


def _plan_of(model: str, layout: str, gpus: int) -> RunPlan:
    train = gpus // 2
    arch = PRESETS[model]
    servers = train // server_gpus(arch, width=2, memory=80 * GIB)
    words = layout.format(expert=min(64, train // 2)).split()
    words += ["--parallel.sequence", "true", "--rollout.prompts", "1024"]
    return make_plan(load_config(FILES, words), arch, Given(world=train, servers=servers))


def _row(model: str, gpus: int, plan: RunPlan) -> str:
    layout = describe_layout(plan.shape) + (", recompute" if plan.shape.recompute else "")
    seconds = {phase.name: f"{phase.seconds:,.0f}" for phase in plan.phases}
    memory, fits = f"{plan.worst.total / GIB:.1f}", "no" if plan.problems else "yes"
    cells = [model, f"{gpus:,}", layout, memory, fits, *(seconds[name] for name in PHASES)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
