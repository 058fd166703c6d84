"""The printed table, its last line and the JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from verify_records import ERRORS, NAMES, RIGHT, result, with_gradients

from megatron_fspo.verify import command
from megatron_fspo.verify.run import Result


def failed(**changes: Any) -> Result:
    return result(problems=["first", "second"], **changes)


def worst(name: str, error: float) -> Any:
    return with_gradients({name: replace(RIGHT, error=error)})


def columns(line: str) -> list[str]:
    """By the places of the titles; numbers end where their titles do."""
    titles = command.header().splitlines()[-1]
    ends = [titles.index(title) + len(title) for title in ("gradient", "log-prob", " S", "loss", "|grad|")]
    ends += [titles.rindex("TP") + 2, titles.rindex("CP") + 2]
    return [line[:end].split()[-1] for end in ends]


def test_a_line_for_each_precision_with_the_largest_of_its_cases() -> None:
    rows = [
        result(errors=worst("model.layers.1.self_attn.k_norm.weight", 2e-6)),
        result(errors=replace(ERRORS, log_prob=3e-7, log_ratio_sum=4e-8, loss=5e-9, grad_norm=6e-8)),
        result(dtype=torch.float64, collectives={"tp": 2.5, "cp": 0.0}),
    ]
    first, second = command.lines("tp2.cp2", rows).splitlines()
    assert first.split() == "tp2.cp2 float32 2e-06 layers.1.k_norm 3e-07 4e-08 5e-09 6e-08 2 1 2 pass".split()
    assert second.split()[:4] == ["tp2.cp2", "float64", "1e-16", "lm_head"]
    assert columns(first) == ["2e-06", "3e-07", "4e-08", "5e-09", "6e-08", "2", "1"]
    assert columns(second) == ["1e-16", "0e+00", "0e+00", "0e+00", "0e+00", "2.5", "0"]
    # The longest names keep the columns.
    for name in (
        "model.layers.11.post_attention_layernorm.weight",
        "model.embed_tokens.weight (the copy on the last stage)",
    ):
        bad = failed(errors=replace(worst(name, math.inf), log_prob=math.inf))
        line = command.lines("pp2.vpp2.dp4.do.overlap.recompute"[:32], [bad, result(), bad])
        assert columns(line)[:2] == ["inf", "inf"] and line.endswith("  2 of 3 FAIL")


def test_failures_come_with_their_problems_and_the_worst_parameter() -> None:
    rows = [
        result(errors=worst("lm_head.weight", 9.0)),  # did not fail
        failed(errors=worst(NAMES[3], 0.5)),
        failed(errors=worst(NAMES[4], 1.5), tied=True, layout="pp2", dtype=torch.float64),
    ]
    assert command.failures(rows) == [
        "tp2.cp2, float32, grpo, uneven:\n  first\n  second",
        "pp2, float64, grpo, uneven, tied:\n  first\n  second",
    ]
    assert [len(command.failures([failed()] * count)) for count in (0, 10, 13)] == [0, 10, 11]
    where = f"{NAMES[4]} (relative error 1.5e+00, layout pp2, grpo)"
    assert command.summary(rows) == f"2 of 3 cases FAILED; worst parameter {where}"
    assert command.summary(rows[:1]).startswith("1 layouts, 1 cases: ")


@pytest.mark.parametrize("passed", [True, False])
def test_json(passed: bool) -> None:
    errors = replace(
        worst("model.norm.weight", 0.5), log_prob=1e-7, log_ratio_sum=2e-7, loss=3e-7, grad_norm=4e-7
    )
    rows = [result(errors=errors), result() if passed else failed(dtype=torch.float64, tied=True)]
    found = command.as_json(rows, world_size=4, collectives="gloo")
    assert json.loads(json.dumps(found)) == found
    assert found["passed"] is passed
    assert (found["world_size"], found["collectives"], found["torch"]) == (4, "gloo", torch.__version__)
    first, second = found["cases"]
    assert first == {
        "layout": "tp2.cp2",
        "dtype": "float32",
        "tied": False,
        "loss": "grpo",
        "split": "uneven",
        "gradient_error": 0.5,
        "parameter": "model.norm.weight",
        "log_prob_error": 1e-7,
        "log_ratio_sum_error": 2e-7,
        "loss_error": 3e-7,
        "grad_norm": 2.0,
        "grad_norm_error": 4e-7,
        "tp_collectives": 2.0,
        "cp_collectives": 1.0,
        "problems": [],
    }
    assert second["problems"] == ([] if passed else ["first", "second"])
