"""The experiment on the drift of the band: its samples, its exact KL, and its kept records."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from launch import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import drift
import recompute
from density import Policy, places

RESULT = REPO / "benchmarks/results/evidence_drift.json"


def test_samples_have_the_expected_accuracy_and_s_of_fresh_ones_has_the_kl_as_its_mean() -> None:
    generator, random = torch.Generator().manual_seed(0), np.random.default_rng(0)
    policy = Policy(generator, 64)
    counts, rewards = drift.sample(policy, 64, 400, random)
    assert rewards.mean().item() == pytest.approx(policy.accuracy(places("dense", 64)), abs=0.005)
    assert set(counts.sum(1).tolist()) == {64.0}
    # Entries of a response form a chain: a symbol is left as often as it is reached, but for the ends.
    block = counts.view(-1, 4, 16, 16)[:, 0]
    assert ((block.sum(2) - block.sum(1)).abs().sum(1) <= 2).all()
    old = policy.log_probs().detach()
    new = torch.log_softmax(old + 0.2 * torch.randn(old.shape, generator=generator), -1)
    s = counts @ (new - old).flatten()
    kl = drift.kl_of(old, new, counts)
    assert kl == pytest.approx(-s.mean().item(), abs=4 * s.std().item() / len(s) ** 0.5) and kl > 0


def test_a_run_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "LENGTHS", (16, 64, 256))
    (auto, records), (again, _), (none, _) = (
        drift.train("fresh", 0.0, arm, seed=1000) for arm in ("auto", "auto", "none")
    )
    assert auto == again and auto["drift"] <= 0 == none["drift"]
    always, _ = drift.train("reused", 0.5, "always", seed=1000)
    assert always["drift"] < 0
    assert len(records) == drift.ROLLOUTS and records[0][0].shape == (7, 48)


def test_kept_records_give_the_figures_again() -> None:
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]
    found = recompute.drift(RESULT.with_suffix(".npz"))
    names = ("below", "above", "positive", "negative")
    assert len(found) == 12
    for name, (accuracy, _, _, *shares) in found.items():
        mine = [run for run in runs if run["arm"] == name]
        assert {run["seed"] for run in mine} == {*drift.SEEDS}
        assert accuracy == pytest.approx(sum(run["accuracy/long"] for run in mine) / len(mine))
        first = next(run for run in mine if run["seed"] == drift.SEEDS[0])
        assert shares == pytest.approx([first[kind] for kind in names], abs=1e-3)
