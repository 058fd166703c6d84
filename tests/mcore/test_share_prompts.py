"""A pass with shared prompts is the same pass; and where it cannot be, the configuration is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import run_worker
from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.sizes import shares_prompts
from megatron_fspo.verify.cases import SMALL
from megatron_fspo.weights.architecture import LinearAttention


@pytest.mark.slow
def test_routers_and_sums_do_not_know_of_it(tmp_path: Path) -> None:
    run_worker(Path(__file__).with_name("share_worker.py"), str(tmp_path / "out.json"), nproc=1)
    off, on = (json.loads((tmp_path / "out.json").read_text())[key] for key in ("False", "True"))
    assert off["tokens"] - on["tokens"] == 3 * 2 + 2 * 5 + 2 * 4  # of verify's groups
    for mine, wanted in zip(on["report"], off["report"], strict=True):
        assert mine == pytest.approx(wanted, rel=1e-12)
    assert on["sums"] == off["sums"] == [0.0] * 16, "the policy that sampled is the one that learns"
    assert on["norm"] == pytest.approx(off["norm"], rel=1e-12)
    # One sequence with an angle for each row: a fused RoPE counts from every border.
    assert on["rope"] == [[0, on["tokens"]], on["tokens"]] and len(off["rope"][0]) > 16


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({}, ""),
        ({"parallel": {"context": 2}}, "parallel.context"),
        ({"moe": {"z_loss_coef": 0.1}}, "moe"),
        ({}, "linear attention"),
    ],
)
def test_on_is_refused_where_it_cannot_be(words: dict[str, Any], named: str) -> None:
    linear = LinearAttention(key_heads=1, value_heads=1, key_size=4, value_size=4, conv=4)
    arch = replace(SMALL, linear=linear) if named == "linear attention" else SMALL

    def resolved(key: str, layers: str = "local") -> bool:
        run = {"run": {"steps": 1}, "model": {"checkpoint": "c"}, "data": {"train": "t"}}
        run |= {"reward": {"name": "exact_match"}, "rollout": {"prompts": 4, "max_response_tokens": 8}}
        config = Config.model_validate(run | words | {"batch": {"share_prompts": key}})
        return shares_prompts(config, layers, arch)

    assert not resolved("off") and resolved("auto") == (not named)
    assert not resolved("auto", "transformer_engine")
    if named:
        with pytest.raises(InputError, match=named):
            resolved("on")
    else:
        assert resolved("on") and resolved("on", "transformer_engine")
