"""How fast a run is: tokens per second and GPU, and the share of what the GPUs can do (MFU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatron_fspo.mcore.backend import peak_tflops
from megatron_fspo.record.log import PHASES
from megatron_fspo.trainer.batches import left_out
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.step import Step
from megatron_fspo.weights.architecture import BACKWARD, forward_flops


def speed_metrics(run: Training, step: Step, seconds: float) -> dict[str, float]:
    """Of a step that took so long."""
    ranks, rollout = dist.get_world_size(), step.rollout
    run.timings["timing_s/step"] = seconds
    tokens = int((rollout.prompt_lengths + rollout.lengths).sum())
    metrics = {
        "perf/throughput": tokens / seconds,
        "perf/tokens_per_second_per_gpu": tokens / seconds / ranks,
    }
    config = run.inputs.config
    peak = config.log.peak_tflops or peak_tflops(run.inputs.backend, run.inputs.dtype)
    # A step that was under way in a checkpoint: the job before took some of its optimizer steps.
    if peak is None or "timing_s/gen" not in run.timings:
        return metrics
    packed = ~left_out(config, rollout, [record.sample for record in step.dropped])
    flops = forward_flops(
        run.inputs.arch, rollout.prompt_lengths[packed].tolist(), rollout.lengths[packed].tolist()
    )
    flops *= (1 + BACKWARD) * config.batch.epochs
    return metrics | {"perf/mfu": flops / run.timings["timing_s/update_actor"] / (ranks * peak * 1e12)}


def table(steps: Sequence[Mapping[str, float]]) -> str:
    """What the phases of some steps took, a line each; "" without steps.

    Args:
        steps: their metrics.
    """
    steps = [one for one in steps if one.get("timing_s/step")]
    if not steps:
        return ""
    whole = _mean(steps, "timing_s/step")
    # Per rank: tokens of a step over the ranks that share them.
    tokens = sum(one["perf/tokens_per_second_per_gpu"] * one["timing_s/step"] for one in steps) / len(steps)
    lines = [
        f"{f'phase, mean of {len(steps)} steps':<28}{'s':>9}{'share':>8}{'tokens/s per rank':>19}{'MFU':>8}"
    ]
    rows = [(words, f"timing_s/{name}") for name, words in PHASES.items()] + [("step", "timing_s/step")]
    for words, name in rows:
        seconds = _mean(steps, name)
        if seconds > 0:
            mfu = _mean(steps, "perf/mfu") if name == "timing_s/update_actor" else 0.0
            cells = f"{seconds:>9.2f}{seconds / whole:>8.0%}{tokens / seconds:>19,.0f}"
            lines.append(f"{words:<28}{cells}{f'{mfu:>8.1%}' if mfu else ''}")
    return "\n".join(lines)


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(one.get(name, 0.0) for one in steps) / len(steps)
