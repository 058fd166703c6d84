"""Ranks that compute slower than the others: a GPU that is hot, a core that is shared, a bad memory module.

Compared is what a rank needs per token for its own micro-batches, forward and backward, in the optimizer
steps of a step: on a CPU the time its main thread computes, so without any wait; on a GPU the time until it
comes to the meeting of all data-parallel ranks. There, ranks that share a copy of the model wait for each
other within that time, so a slow one shows on all of its copy, and they are named together.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import torch.distributed as dist

from megatron_fspo.job.rank_status import named_ranks
from megatron_fspo.parallel.metrics import gather_lists
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.step import Step

RATIO = 1.3
"""Times the median: slow."""
STEPS = 3
"""In a row until a rank is named."""


class Pace(NamedTuple):
    """The pace of a rank in one step."""

    seconds: float
    """Per token, for its own forward and backward passes."""
    stage: int
    """Pipeline stage; stages have unlike work, and are not compared."""
    host: str


def slow_rank_metrics(run: Training, step: Step) -> dict[str, float]:
    """The slowest rank of the step, and by how much; says who has been slow for several. Collective."""
    world = dist.group.WORLD
    assert world is not None
    tokens = step.packs.tokens * run.inputs.config.batch.epochs
    mine = Pace(run.policy.busy_seconds / max(tokens, 1), run.groups.pp.rank(), socket.gethostname())
    run.policy.busy_seconds = 0.0
    paces = gather_lists([mine], group=world)
    over_median = ratios(paces)
    run.slow_for = {
        rank: run.slow_for.get(rank, 0) + 1 for rank, one in enumerate(over_median) if one >= RATIO
    }
    for host, line in lines(run.slow_for, over_median, paces).items():
        run.log.remind(f"slow ranks on {host}", run.step + 1, line)
    slowest = max(range(len(over_median)), key=over_median.__getitem__)
    return {"perf/slowest_rank": float(slowest), "perf/slowest_rank_over_median": over_median[slowest]}


def ratios(paces: Sequence[Pace]) -> list[float]:
    """Per rank its seconds per token over the median of its pipeline stage."""
    stages = {one.stage: [other.seconds for other in paces if other.stage == one.stage] for one in paces}
    medians = {stage: median_low(seconds) for stage, seconds in stages.items()}
    # 0: a stage that had nothing to do.
    return [one.seconds / medians[one.stage] if medians[one.stage] else 1.0 for one in paces]


def lines(slow_for: Mapping[int, int], over_median: Sequence[float], paces: Sequence[Pace]) -> dict[str, str]:
    """Host → the line about its ranks that have been slow for :data:`STEPS` steps or more."""
    by_host: dict[str, list[int]] = {}
    for rank, steps in sorted(slow_for.items()):
        if steps >= STEPS:
            by_host.setdefault(paces[rank].host, []).append(rank)
    said = {}
    for host, ranks in by_host.items():
        ratio, steps = max(over_median[rank] for rank in ranks), min(slow_for[rank] for rank in ranks)
        said[host] = (
            f"{named_ranks(ranks)} on {host} needed {ratio:.2f} times the median of seconds per token in "
            f"forward and backward, for {steps} steps in a row: all others wait for that"
        )
    return said
