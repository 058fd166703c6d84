"""The mismatch alarm names the cause that was planted, and is silent on a sound rollout."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alarm_worker import ALONE, LAYOUTS, OLDER, RESPONSES
from launch import REPO, found_by
from megatron_fspo.config import Config
from megatron_fspo.trainer.begin import make_alarm

RAW = "log-probs before the temperature"
OTHER_TEMPERATURE = "another temperature: scored at {:.3g} instead of rollout.temperature = {:g}"
CUT = "a vocabulary cut by top-p or top-k"
WEIGHTS = "other weights than claimed, or other kernels"

CAUSES = {
    "sound": None,
    "sound at 1": None,
    "sound in bf16": None,
    "raw": RAW,
    "raw in bf16": RAW,
    "temperature ignored": RAW,
    "temperature 0.9": OTHER_TEMPERATURE.format(0.9, 0.7),
    "temperature 0.35": OTHER_TEMPERATURE.format(0.35, 0.7),
    "temperature 1.4 for 1": OTHER_TEMPERATURE.format(1.4, 1),
    "temperature 0.9 in bf16": "another temperature",
    "top-p": f"{CUT}, and log-probs renormalised over the rest; but rollout.top_p is 1",
    "top-p as asked": f"{CUT}, and log-probs renormalised over the rest; expected with rollout.top_p = 0.6",
    "top-p in bf16": CUT,
    "top-p a little over the limit": CUT,
    "top-p at another temperature": WEIGHTS,
    "other weights": WEIGHTS,
    "weights nearby": WEIGHTS,
    "weights of a surer model": WEIGHTS,
    "some older": None,
    "partly older": RAW,
    "partly older, and not right before": None,
    "spoilt": WEIGHTS,
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("alarm_worker.py")
    one, two = (found_by(worker, tmp_path_factory.mktemp("alarm"), nproc=nproc) for nproc in (1, 2))
    return one | two


@pytest.mark.slow
@pytest.mark.parametrize("situation", CAUSES)
def test_the_cause_is_named(said: dict[str, Any], situation: str) -> None:
    metrics, text = said[ALONE][situation]
    cause = CAUSES[situation]
    assert metrics == {"rollout/mismatch_alarm": 0.0 if cause is None else 1.0}, text
    if cause is None:
        assert text is None
    else:
        assert f"Likeliest cause: {cause}" in text and "\n" not in text
        assert "tokens of the present weights, version 5; rollout.mismatch_limit is " in text


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout(said: dict[str, Any], layout: str) -> None:
    for situation in ("sound", "raw", "other weights"):
        metrics, text = said[layout][situation]
        cause = CAUSES[situation]
        assert metrics["rollout/mismatch_alarm"] == (cause is not None)
        assert text is None if cause is None else cause in text


@pytest.mark.slow
def test_only_tokens_of_the_present_weights_say_anything(said: dict[str, Any]) -> None:
    metrics, text = said[ALONE]["older weights"]
    assert math.isnan(metrics["rollout/mismatch_alarm"]) and text is None


@pytest.mark.slow
def test_the_fresh_tokens_of_a_response_are_counted(said: dict[str, Any]) -> None:
    def tokens(situation: str) -> int:
        before, _, _ = said[ALONE][situation][1].partition(" tokens of the present")
        return int(before.split()[-1].replace(",", ""))

    assert tokens("raw") - tokens("partly older") == OLDER * RESPONSES


def test_a_trainer_in_fp8_may_differ_more_from_its_sampler() -> None:
    base = tomllib.loads((REPO / "examples/make_sum/run.toml").read_text(encoding="utf-8"))
    base["model"] |= {"dtype": "bfloat16", "backend": "cuda"}
    base["parallel"] = {}

    def limit(recipe: str, **rollout: Any) -> float:
        words = base | {"fp8": {"recipe": recipe}, "rollout": base["rollout"] | rollout}
        inputs = SimpleNamespace(
            config=Config.model_validate(words),
            dtype=torch.bfloat16,
            backend=SimpleNamespace(device=torch.device("cpu")),
        )
        run: Any = SimpleNamespace(inputs=inputs, step=0, groups=None)
        responses: Any = SimpleNamespace(fresh_from=lambda version: torch.zeros(1))
        return make_alarm(run, responses).limit

    # Mean |Δ| of sound runs: up to 0.22 in FP8, 0.011 without.
    assert limit("blockwise") > 0.22 > limit("none") > 0.011
    assert limit("blockwise", mismatch_limit=0.1) == limit("none", mismatch_limit=0.1) == 0.1
