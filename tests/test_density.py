"""The experiment on the density of uncertain tokens: its task, its widths, and its kept records."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from launch import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import itertools

import density
import recompute
from density import DECISIONS, LONGEST, ROLLOUTS, Policy, Width, length_at, places, train

RESULT = REPO / "benchmarks/results/evidence_density.json"


def test_uncertain_tokens_grow_with_the_length_or_do_not() -> None:
    lengths = [length_at(rollout) for rollout in range(ROLLOUTS)]
    assert lengths == sorted(lengths) and lengths[0] == 16 and lengths[-3:] == [LONGEST] * 3
    assert set(lengths[:5]) == {16}
    assert places("dense", 48).tolist() == [0] * 16 + [1] * 16 + [2] * 16
    assert places("fixed", 48).tolist() == [place * 3 // 16 for place in range(DECISIONS)]
    assert len(places("fixed", LONGEST)) == DECISIONS and int(places("fixed", LONGEST).max()) == 60


def test_samples_have_the_expected_accuracy_and_the_log_probs_of_their_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, rewards = Policy(generator), []
    for _ in range(20):
        counts, reward = policy.sample(places("dense", 64), generator)
        rewards.append(reward)
    assert torch.cat(rewards).mean().item() == pytest.approx(policy.accuracy(places("dense", 64)), abs=0.01)
    assert counts.shape == (128, 4 * 256) and set(counts.sum(1).tolist()) == {64.0}
    # Where a symbol is drawn next, the next one is drawn from there: entries of a response form a chain.
    before, after = counts.view(128, 4, 16, 16)[:, 0].sum(2), counts.view(128, 4, 16, 16)[:, 0].sum(1)
    assert ((before - after).abs().sum(1) <= 2).all()


@pytest.mark.parametrize(
    ("arm", "sigma", "c"), [("sqrt", 9, 2), ("narrow", 9, 0.5), ("measured", 9, 4), ("measured", 0.01, 1)]
)
def test_a_width_measured_again_moves_slowly_and_not_far(arm: str, sigma: float, c: float) -> None:
    width, lengths = Width(arm), torch.full((100,), 16)
    normal = torch.tensor([0.6744897501960817, -0.6744897501960817] * 50, dtype=torch.float64) * 4
    for _ in range(5):
        width.observe(normal, lengths)
    assert width.c == pytest.approx(0.5 if arm == "narrow" else 2)
    steps = [width.c]
    for _ in range(20):
        width.observe(sigma * normal, lengths)
        steps.append(width.c)
    assert width.c == pytest.approx(c)
    assert all(abs(torch.tensor(b / a).log()) < 0.0954 for a, b in itertools.pairwise(steps))
    free = Width("free")
    for factor in (1, 1, 1, 1, 1, 3):
        free.observe(factor * normal, lengths)
    assert free.c == pytest.approx(6)


def test_a_run_can_be_repeated_and_nothing_is_clipped_without_a_band() -> None:
    (once, _), (again, records), (bare, _) = (
        train("fixed", 0.0, 0.03, arm, seed=1000) for arm in ("sqrt", "sqrt", "bare")
    )
    assert once == again and once["clipped_early"] > 0 == bare["clipped_early"]
    assert len(records) == ROLLOUTS and records[0][0].shape == (11, 128)


def test_kept_records_give_the_figures_again() -> None:
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]
    found = recompute.density(RESULT.with_suffix(".npz"))
    for name, (accuracy, _, _, late) in found.items():
        mine = [run for run in runs if run["arm"] == name]
        assert {run["seed"] for run in mine} == {*density.SEEDS}
        assert accuracy == pytest.approx(sum(run["accuracy/long"] for run in mine) / len(mine))
        assert late == pytest.approx(next(run["clipped_late"] for run in mine if run["seed"] == 1), rel=1e-4)
