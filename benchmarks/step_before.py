"""One step of commit aef6116 but for the model, for benchmarks/step_overhead.py: every rank holds all samples
as Python's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# An older commit has these.
# ruff: noqa: I001
from megatron_fspo.trainer import batches, sampling
from megatron_fspo.trainer.ahead import staleness_metrics
from megatron_fspo.trainer.optimize import optimize, score_old
from step_synthetic import Clock


def wrap(clock: Clock) -> None:
    """Time what is done inside of other phases."""
    clock.wrap(sampling, "share", "exchange")
    clock.wrap(sampling, "gather_lists", "exchange")
    clock.wrap(batches, "collate", "collate")


def ask(inputs: Any, engine: Any, groups: Any, prompts: Any, params: Any) -> Any:
    """Ask for responses."""
    return sampling.ask(engine, groups, prompts, params)


def collect(run: Any, batch: Any, clock: Clock) -> Sequence[Any]:
    """The responses, graded."""
    with clock("grade"):
        graded = sampling.collect_and_grade(run.inputs, run.groups, batch)
        return sampling.make_samples(run.inputs, batch.prompts, graded)


def step(run: Any, samples: Sequence[Any], clock: Clock) -> dict[str, float]:
    """From responses to metrics."""
    with clock("plan"):
        packs = batches.make_mini_batches(
            run.inputs.config, run.inputs.arch, samples, run.groups, run.inputs.backend.device
        )
    with clock("grade"):
        metrics = sampling.sampling_metrics(samples) | staleness_metrics(samples, run.step, limit=0)
    with clock("mismatch"):
        packs, mismatch = score_old(run, packs, samples)
    with clock("records"):
        return metrics | mismatch | optimize(run, packs, samples)
