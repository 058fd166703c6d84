"""Responses with A = 0 are in no pack, and the gradient is the same: in every layout of two ranks.

Through the trainer's own plan, exchange, packs, loss and optimizer; see :mod:`left_out_worker`.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch import found_by
from left_out_worker import HAS_VARIANCE, LAYOUTS, LOSSES, PROMPTS, SAMPLES
from megatron_fspo.trainer.metrics import router_metrics
from megatron_fspo.trainer.rollout import COLUMNS, describe, make_rollout, sampling_metrics, with_advantages
from megatron_fspo.types import Completion, Prompt
from metrics_page import unknown

ALL = list(range(PROMPTS * SAMPLES))
THIRD = PROMPTS // 3 * SAMPLES
"""Responses of a mini-batch."""
WITH_GRADIENT = [n for n in ALL if HAS_VARIANCE[n // SAMPLES] and n % SAMPLES != 1]
POLICY_ONLY = [name for name in LOSSES if "," not in name]
OTHERS = [name for name in LOSSES if "," in name]

# Two layers of 4 experts: tokens of each; then tokens, Σ entropy, Σ losses, flips, compared.
REPORT = torch.tensor(
    [[1, 2, 3, 2, 4, 2.0, 8, 16, 1, 5], [0, 0, 4, 4, 4, 4.0, 16, 32, 3, 5]], dtype=torch.float64
)
BY_HAND = {
    "router/load_max": 2.0,
    "router/load_max/mean": 1.75,
    "router/idle": 0.25,
    "router/entropy": 0.75,
    "router/aux_loss": 3.0,
    "router/z_loss": 6.0,
    "actor/route_flips": 0.4,
    "rollout/route_flips": 0.4,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("left_out_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("left_out"), nproc=2)


def packed(steps: list[dict[str, Any]], way: int) -> list[int]:
    return [number for step in steps for number in step["packed"][way]]


@pytest.mark.parametrize("loss", POLICY_ONLY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_all_responses(found: dict[str, Any], layout: str, loss: str) -> None:
    steps = found[layout][loss]
    assert packed(steps, 0) == WITH_GRADIENT and packed(steps, 1) == ALL
    for number, step in enumerate(steps):
        (n, t, in_packs), (want_n, want_t, whole) = step["totals"]
        assert (n, t) == (want_n, want_t) and want_n == THIRD - (number == 1) and in_packs < whole == t
        got, want = step["grad_norm"]
        if number == 2:  # nobody has a gradient: no pack has a sequence
            assert step["packed"][0] == [] and in_packs == 0
            assert got == want == step["gap"] == 0
            assert all(math.isnan(value) for value in step["metrics"][0].values())
        else:
            assert want > 0.01 and got == pytest.approx(want, rel=1e-5)
            assert step["gap"] < 1e-5
            assert step["metrics"][0]["actor/pg_loss"] == pytest.approx(
                step["metrics"][1]["actor/pg_loss"], rel=1e-5
            )


@pytest.mark.parametrize("loss", OTHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_stay_where_another_term_needs_them(found: dict[str, Any], layout: str, loss: str) -> None:
    steps = found[layout][loss]
    assert packed(steps, 0) == packed(steps, 1) == ALL
    for step in steps:
        assert step["totals"][0] == step["totals"][1] and step["grad_norm"][0] > 1e-3
        assert step["gap"] < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_and_reports_the_same(found: dict[str, Any], layout: str, loss: str) -> None:
    for got, want in zip(found[layout][loss], found["dp2"][loss], strict=True):
        assert got["grad_norm"][0] == pytest.approx(want["grad_norm"][0], rel=1e-5)
        # A slope through logarithms of small sums has their rounding several times over.
        fit, fitted = (one["reported"][0].get("fspo/exponent_fit", 0.0) for one in (got, want))
        assert fit == pytest.approx(fitted, abs=1e-4, nan_ok=True)
        expected = want["reported"][0] | {"fspo/exponent_fit": fit}
        assert got["reported"][0] | {"fspo/exponent_fit": fit} == pytest.approx(
            expected, rel=1e-5, abs=1e-6, nan_ok=True
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routes_come_to_the_ranks_that_replay_them(found: dict[str, Any], layout: str) -> None:
    """Each stage has those of its own layers; tokens without any are those of padding, the last of each
    response, and of responses that came without."""
    right, none, wrong = found[layout]["routes"]
    shared = 2 if layout in ("pp2", "tp2.sp") else 1  # ranks that see the same token
    assert wrong == 0 and right == shared * found["dp2"]["routes"][0] > 100 * shared and none > 20


@pytest.mark.parametrize("loss", [name for name in LOSSES if " with " in name])
def test_every_correction_acts(found: dict[str, Any], loss: str) -> None:
    got, plain = found["dp2"][loss][0], found["dp2"][loss.partition(" with ")[0]][0]
    assert got["grad_norm"][0] != pytest.approx(plain["grad_norm"][0], rel=1e-3)
    assert got["metrics"][0]["actor/pg_loss"] == plain["metrics"][0]["actor/pg_loss"]
    assert 0 < got["reported"][0]["rollout/correction_weight_mean"] < 1.03


def test_statistics_of_sampling_are_over_all_responses() -> None:
    table = torch.zeros(8, len(COLUMNS), dtype=torch.float64)
    table[:, COLUMNS.index("lengths")] = torch.arange(8.0)
    table[:, COLUMNS.index("rewards")] = torch.tensor([1.0, 0, 0.5, 0.5, 1, 1, 1, 1])
    prompts = [Prompt(index=i, token_ids=(1,) * (i + 1), text="", answer="") for i in range(2)]
    rollout = make_rollout(prompts, 4, table, {})
    metrics = sampling_metrics(with_advantages(rollout, torch.tensor([[0.5, -0.5, 0, 0], [0.0] * 4])))
    assert metrics["critic/rewards/mean"] == 0.75 and metrics["response_length/mean"] == 3.5
    # The means of the prompts are 1/2 and 1: t of one degree of freedom times their standard error, 1/4.
    ends = [metrics[f"critic/rewards/mean/{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([0.75 - 12.706 / 4, 0.75 + 12.706 / 4], rel=1e-3)
    assert metrics["prompt_length/mean"] == 1.5 and metrics["critic/advantages/mean"] == 0
    # Of groups: a response at the mean of its group is in one that teaches.
    assert metrics["critic/zero_variance_groups"] == 0.5


@pytest.mark.parametrize(
    ("routed", "share", "lines"), [([0] * 4, None, 0), ([1] * 4, 0.0, 0), ([1, -1, 1, 1], 0.25, 1)]
)
def test_responses_without_routes_are_counted(routed: list[int], share: float | None, lines: int) -> None:
    """And named, with the first reason; nothing is said where no routes are replayed."""
    table = torch.zeros(4, len(COLUMNS), dtype=torch.float64)
    table[:, COLUMNS.index("routed")] = torch.tensor(routed, dtype=torch.float64)
    without = Completion(
        token_ids=[1], log_probs=[0.0], finish_reason="stop", weight_version=0, route_problem="none came"
    )
    rollout = make_rollout([Prompt(index=0, token_ids=(1,), text="", answer="")], 4, table, {1: without})
    said: list[str] = []
    log: Any = SimpleNamespace(remind=lambda topic, step, text: said.append(text))
    batch: Any = SimpleNamespace(rollout=rollout, routers=REPORT)
    metrics = router_metrics(REPORT, batch, 4, log, 4)
    assert metrics.pop("rollout/route_fallback", None) == share
    assert metrics == pytest.approx(BY_HAND)
    assert len(said) == lines and all("1 of 4" in text and "none came" in text for text in said)
    assert describe(without, 0)[COLUMNS.index("routed")] == -1
    assert unknown(metrics) == []
