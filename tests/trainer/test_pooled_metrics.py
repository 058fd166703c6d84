"""Metrics of the optimizer steps of a rollout, as one: whatever the split into mini-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from configs import make_config
from megatron_fspo.mcore.model.policy import Update
from megatron_fspo.parallel.groups import Totals
from megatron_fspo.trainer import metrics
from megatron_fspo.trainer.metrics import pooled_metrics, update_metrics
from megatron_fspo.trainer.optimize import OptimizerStep

# Tokens 10, 1000 and 90; N = 4, 2 and 2.
NAMES = ("actor/entropy", "actor/kl_loss", "actor/pg_loss", "actor/ppo_kl", "fspo/kl_k3")
UPDATES: list[Totals] = [
    dict(zip(NAMES, zip(sums, (tokens, tokens, n, tokens, tokens), strict=True), strict=True))
    for tokens, n, sums in (
        (10.0, 4.0, (30.0, 1.0, -4.0, 0.0, 0.0)),
        (1000.0, 2.0, (1000.0, 2.0, 1.0, 5.0, 20.0)),
        (90.0, 2.0, (180.0, 3.0, 1.0, 0.9, 9.0)),
    )
]
NOTHING: Totals = dict.fromkeys(NAMES, (0.0, 0.0))
"""A mini-batch with nothing in packs."""


def test_sums_over_sums() -> None:
    got = pooled_metrics(UPDATES, on_policy=1)
    assert got == pytest.approx(
        {
            "actor/entropy": 1210 / 1100,  # the mean of the means is 2
            "actor/kl_loss": 6 / 1100,
            "actor/pg_loss": -2 / 8,
            # Without the first one, in which it is 0.
            "actor/ppo_kl": 5.9 / 1090,
            "fspo/kl_k3": 29 / 1090,
        }
    )
    # From the sampler's log-probs all are off-policy.
    assert pooled_metrics(UPDATES, on_policy=0)["fspo/kl_k3"] == pytest.approx(29 / 1100)


@pytest.mark.parametrize("updates", [UPDATES[:1], [UPDATES[0], NOTHING], [UPDATES[0], NOTHING, NOTHING]])
def test_without_an_off_policy_one_there_is_no_kl_rather_than_one_of_0(updates: Any) -> None:
    got = pooled_metrics(updates, on_policy=1)
    assert math.isnan(got["fspo/kl_k3"]) and math.isnan(got["actor/ppo_kl"])
    assert got["actor/entropy"] == 3.0


@pytest.mark.parametrize("place", range(4))
def test_a_mini_batch_with_nothing_in_packs_changes_nothing(place: int) -> None:
    on_policy = min(place, 1)  # in place 0 the weights do not move, but whether they did is not asked
    with_it = pooled_metrics([*UPDATES[:place], NOTHING, *UPDATES[place:]], on_policy=on_policy)
    assert with_it == pooled_metrics(UPDATES, on_policy=on_policy)


def test_what_a_step_reports() -> None:
    updates = [
        Update(totals=totals, grad_norm=norm, learning_rate=1e-4)
        for totals, norm in zip(UPDATES, (1.0, 2.0, 6.0), strict=True)
    ]
    run, batch, loss = mock.Mock(), mock.Mock(), mock.Mock()
    run.state.step, run.state.loss = 0, loss
    run.inputs.config = make_config(Path(), optimizer={"skip_norm_ratio": 10.0})
    for nothing in (loss.metrics, loss.width_warnings, loss.noise_metrics):
        nothing.return_value = {}

    def report(*skipped: bool) -> dict[str, float]:
        steps = [
            OptimizerStep(
                number=number + 1,
                update=replace(update, skipped=skip),
                records=[mock.Mock(nonfinite=True, counts=False)],
                num_sequences=2,
                on_policy=all(skipped[:number]),
                measured=False,
                tokens=[],
                routers=None,
            )
            for number, (update, skip) in enumerate(zip(updates, skipped, strict=True))
        ]
        with mock.patch.object(metrics, "clip_metrics", return_value={}):
            return update_metrics(run, batch, steps)

    got = report(False, False, False)
    assert got["fspo/kl_k3"] == pytest.approx(29 / 1090) and got["fspo/kl_k3/on_policy"] == 0
    # Of the optimizer steps, each counted once.
    assert got["actor/skipped_updates"] == 0
    assert got["actor/grad_norm"] == 3 and got["actor/grad_norm/max"] == 6 and got["fspo/nonfinite"] == 3

    # The policy was moved by the third at last: S of all three was 0.
    got = report(True, True, False)
    assert math.isnan(got["fspo/kl_k3"]) and got["actor/skipped_updates"] == 2
    assert report(False, True, False)["fspo/kl_k3"] == pytest.approx(29 / 1090)
