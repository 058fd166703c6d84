"""The mismatch alarm names the cause that was planted, and is silent on a sound rollout."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alarm_worker import ALONE, IN_EVERY_LAYOUT, LAYOUTS, SITUATIONS
from launch import REPO, found_by
from megatron_fspo.config.loading import load_config
from megatron_fspo.trainer.mismatch import make_alarm


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("alarm_worker.py")
    one, two = (found_by(worker, tmp_path_factory.mktemp("alarm"), nproc=nproc) for nproc in (1, 2))
    return one | two


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_cause_is_named(said: dict[str, Any], situation: str) -> None:
    metrics, text = said[ALONE][situation]
    cause, _ = SITUATIONS[situation]
    assert metrics == {"rollout/mismatch_alarm": 0.0 if cause is None else 1.0}, text
    if cause is None:
        assert text is None
    else:
        assert f"Likely cause: {cause}" in text and "\n" not in text
        assert "tokens of the current weights, version 5; rollout.mismatch_limit is " in text


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout(said: dict[str, Any], layout: str) -> None:
    for situation, (cause, _) in IN_EVERY_LAYOUT.items():
        metrics, text = said[layout][situation]
        assert metrics["rollout/mismatch_alarm"] == (cause is not None)
        assert text is None if cause is None else cause in text


@pytest.mark.slow
def test_only_tokens_of_the_present_weights_say_anything(said: dict[str, Any]) -> None:
    metrics, text = said[ALONE]["older weights"]
    assert math.isnan(metrics["rollout/mismatch_alarm"]) and text is None


def test_a_trainer_in_fp8_may_differ_more_from_its_sampler() -> None:
    def limit(recipe: str, *words: str) -> float:
        asked = ["--model.dtype", "bfloat16", "--model.backend", "cuda", "--fp8.recipe", recipe, *words]
        config = load_config(REPO / "examples/make_sum/run.toml", asked)
        responses: Any = SimpleNamespace(fresh_from=lambda version: torch.zeros(1))
        groups: Any = None
        return make_alarm(config, responses, 0, groups, torch.bfloat16, torch.device("cpu")).limit

    # Mean |Δ| of sound runs: up to 0.22 in FP8, 0.011 without.
    assert limit("blockwise") > 0.22 > limit("none") > 0.011
    own = ("--rollout.mismatch-limit", "0.1")
    assert limit("blockwise", *own) == limit("none", *own) == 0.1
