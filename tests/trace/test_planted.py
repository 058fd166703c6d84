"""Mistakes that a GPU would show are shown without one, and named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checks import problems
from lane import EXAMPLES, lane, request

from megatron_fspo.cli import main
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.lab.trace.command import as_text

COLOCATED = ("two_nodes.toml", "colocated.toml")
# Rows that are whole blocks of FP8 only where a pack is padded to them.
UNEVEN = {"layers": 4, "data__max_prompt_tokens": 1064, "batch__max_tokens": 4136}
FAULTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "host_mask": ("device", (), {}),
    "item": ("item", (), {}),
    "row_by_row": ("tolist", (), {}),
    "pageable_copy": ("pageable copy", (), {}),
    "all_reduce": ("collective", (), {}),
    "logits": ("logits", (), {}),
    "wrong_group": ("group", ("two_nodes.toml",), {"world": 16}),
    "float64": ("float64", (), {}),
    "read_early": ("early", (), {}),
    "not_lent": ("lent", COLOCATED, {"world": 16}),
    "not_connected": ("connected", (), {}),
    "short_rows": ("collective", ("fp8.toml",), UNEVEN),
    "nonzero": ("nonzero", (), {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    kind, files, keys = FAULTS[fault]
    asked = request(*files, fault=f"faults:{fault}", **keys)
    named = problems(lane()(asked), asked)
    assert any(line.startswith(f"{kind}:") for line in named), named


def test_fp8_rows_of_any_pack_are_whole() -> None:
    asked = request("fp8.toml", **UNEVEN)
    assert problems(lane()(asked), asked) == []


def forward_flops() -> float:
    """Products of a forward pass of SmolLM2 on a prompt of 2,048 and a response of 8,192 tokens, by hand."""
    a, tokens, response = PRESETS["smollm2-135m"], 10240, 8192
    matrices = a.hidden_size * (2 * a.q_size + 2 * a.kv_size + 3 * a.ffn_size)
    attention = 2 * 2 * tokens**2 / 2 * a.q_size
    return a.num_layers * (2 * tokens * matrices + attention) + 2 * response * a.hidden_size * a.vocab_size


def test_the_command_traces_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["plan", "--config", str(EXAMPLES / "qwen3_8b/run.toml"), "--model", "smollm2-135m", "--nproc", "2"]
    run += ["--parallel.tensor", "1", "--parallel.sequence", "false", "--batch.max_tokens", "10240"]
    assert main([*run, "--trace", "1", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["flops"]["old pass"] == pytest.approx(seen["micro_batches"] * forward_flops(), rel=1e-3)
    assert seen["peaks"]["update"] == pytest.approx(seen["planned"], rel=0.05)
    text = as_text(seen, 1, 2)
    assert "rank 1 of 2" in text and "dp in a node: allreduce" in text and "head.py" in text
    assert main([*run, "--trace", "all"]) == 0
    head, _, verdict = capsys.readouterr().out.rpartition(": ")
    assert head.startswith("2 ranks in place of 2 (data 2, layers 2): ") and verdict == "sound\n"
    assert main([*run, "--trace", "2"]) == 2
    assert "--trace 2" in capsys.readouterr().err
