"""The plan's bytes beside those of real ranks: a policy, its optimizer, its checkpoint and one backward."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks import plan_memory
from launch import REPO, found_by

pytestmark = pytest.mark.slow

RANK = REPO / "benchmarks/plan_rank.py"
SMALL = {"model": "small", "layers": 4, "state": True, "rows": (3, 17), "shapes": ((3, 21), (5, 27))}
BOTH = {"tensor": 2, "pipeline": 2, "sequence": True}
SPREAD = {"distributed_optimizer": True}


def small(dtype: str = "float32", *, model: str = "small", tied: bool = False, **parallel: Any) -> Any:
    return {**SMALL, "model": model, "dtype": dtype, "tied": tied, "parallel": parallel}


# By world size: what is exact.
STATE = {
    1: {"one": small(), "one bf16 tied": small("bfloat16", tied=True)},
    2: {
        "tp2": small(tensor=2),
        "tp2 sp bf16": small("bfloat16", tensor=2, sequence=True),
        "pp2 tied": small(pipeline=2, tied=True),
        "pp2 vpp2": small(pipeline=2, virtual_pipeline=2) | {"packs": 2},
        "cp2 do": small(context=2, **SPREAD),
        "dp2": small(),
        "dp2 do overlap": small(**SPREAD, overlap_grad_reduce=True),
        "dp2 do bf16 tied": small("bfloat16", tied=True, **SPREAD),
        "ep2 do": small(model="small-moe", expert=2, **SPREAD),
    },
    4: {
        "tp2 pp2 tied": small("bfloat16", tied=True, **BOTH),
        "pp2 dp2 do tied": small("bfloat16", tied=True, pipeline=2, **SPREAD),
        "tp2 cp2 do": small(tensor=2, context=2, **SPREAD),
    },
}
# Real widths; fewer layers, and of the vocabulary what needs little memory.
WIDE = {"layers": 4, "vocab_size": 4096, "dtype": "float32", "shapes": ((32, 96), (16, 112), (64, 192))}


def wide(model: str = "smollm2-135m", **more: Any) -> Any:
    return {**WIDE, "model": model, "parallel": {}, **more}


# Tensor parallel on the model whose heads split, the rest on the smaller one: `benchmarks/plan_memory.py` has
# all of both models, with all their layers.
ACTIVATIONS = {
    1: {
        "float32": wide(),
        "recompute": wide(recompute=True),
        "bfloat16": wide(dtype="bfloat16"),
    },
    2: {
        "tp2": wide("qwen3-0.6b", parallel={"tensor": 2}),
        "tp2 sp": wide("qwen3-0.6b", parallel={"tensor": 2, "sequence": True}),
        "pp2 vpp2": wide(parallel={"pipeline": 2, "virtual_pipeline": 2}, packs=4),
        "cp2 recompute bf16": wide(parallel={"context": 2}, recompute=True, dtype="bfloat16"),
    },
}


@cache
def found(world: int) -> dict[str, list[dict[str, Any]]]:
    """By case what its ranks measured: one launch of a world size."""
    cases = STATE[world] | {f"wide {name}": case for name, case in ACTIVATIONS.get(world, {}).items()}
    with TemporaryDirectory() as folder:
        results = found_by(RANK, Path(folder), json.dumps(list(cases.values())), nproc=world)
    return dict(zip(cases, results, strict=True))


def names(cases: dict[int, dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("world", "name"), [(n, name) for n in cases for name in cases[n]])


@names(STATE)
def test_state_and_checkpoint_are_exact(world: int, name: str) -> None:
    case, ranks = STATE[world][name], found(world)[name]
    for measured in ranks:
        planned = plan_memory.planned(case, measured, world)
        exact = {key: planned[key] for key in plan_memory.EXACT}
        assert exact == {key: measured[key] for key in plan_memory.EXACT}
    # Only the first rank sends weights.
    assert plan_memory.planned(case, ranks[0], world)["sent"] == pytest.approx(ranks[0]["sent"], rel=0.1)


@names(ACTIVATIONS)
def test_activations_are_within_a_tenth(world: int, name: str) -> None:
    case = ACTIVATIONS[world][name]
    for measured in found(world)[f"wide {name}"]:
        planned = plan_memory.planned(case, measured, world)
        for key in ("held", "peak"):
            assert planned[key] == pytest.approx(measured[key], rel=0.1), (key, measured)
