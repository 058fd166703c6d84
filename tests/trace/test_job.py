"""All ranks of small jobs agree, with packs of many lengths; and one rank that does not is named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from lane import lane, request

from megatron_fspo.lab.trace.command import trace_all
from megatron_fspo.lab.trace.record import Request

SMALL = {
    "data__max_prompt_tokens": 256,
    "rollout__max_response_tokens": 256,
    "batch__max_tokens": 1024,
    "parallel__distributed_optimizer": True,
    "parallel__overlap_grad_reduce": True,
}
ALONE = SMALL | {"parallel__tensor": 1, "parallel__sequence": False, "world": 2}
JOBS: dict[str, dict[str, Any]] = {
    "TP and DP": SMALL | {"parallel__tensor": 2, "world": 4},
    "PP": ALONE | {"parallel__pipeline": 2},
    "EP": ALONE
    | {
        "parallel__expert": 2,
        "model": "qwen3-30b-a3b",
        "moe__replay": "old_pass",
        "layers": 1,
        "experts": 16,
    },
}
ODD = 1
# Fault → job, and what is said of the rank: in which group, what, and where.
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "skipped": ("TP and DP", ("world", "rank 1: nothing", "any_rank (update)")),
    "other_dtype": (
        "TP and DP",
        ("rank 1: allreduce float16", "rank 3: allreduce int32", "finalize_model_grads"),
    ),
    "other_count": ("TP and DP", ("rank 1: allreduce int32 [2]", "rank 3: allreduce int32 [1]")),
    "one_more": (
        "TP and DP",
        ("rank 1: allreduce int32 [1]", "rank 3: allreduce float64", "sum_metrics (update)"),
    ),
    "other_root": ("TP and DP", ("rank 1: broadcast float64 [3] root 1", "broadcast_first (old pass)")),
    "fewer_batches": (
        "TP and DP",
        ("tensor_model_parallel_group (0,1)", "rank 0: reduce_scatter", "rank 1: "),
    ),
    "other_order": ("TP and DP", ("circle, with a communicator per group", "rank 1 waits in", "any_rank")),
    "both_send": (
        "PP",
        ("rank 1: nothing", "rank 0: send", "rank 1: send", "rank 0: recv", "p2p_communication.py"),
    ),
    "uneven_pieces": ("EP", ("rank 1 gives", "rank 0 takes", "alltoall_base", "mappings.py")),
}


def job(name: str) -> Request:
    return request(**JOBS[name], job=name)


@cache
def whole(name: str) -> dict[str, Any]:
    """The last answer of a job without a fault, which the process keeps for those with one."""
    return trace_all(job(name), lane())


@pytest.mark.parametrize("name", JOBS)
def test_the_ranks_of_a_job_agree(name: str) -> None:
    assert whole(name)["differ"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_differs_is_named(fault: str) -> None:
    name, told = FAULTS[fault]
    whole(name)
    seen = lane()(replace(job(name), rank=ODD, fault=f"faults:{fault}"))
    assert seen["error"] is None, seen["traceback"]
    text = "\n".join(seen["differ"])
    assert [part for part in told if part not in text] == [], text
