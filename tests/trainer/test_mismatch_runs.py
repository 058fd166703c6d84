"""Whole runs: where old log-probs come from, what a correction does to the step, and the alarm."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from launch import REPO, why
from megatron_fspo.config.loading import load_config
from megatron_fspo.record.rows import read_rows
from megatron_fspo.trainer.batch import needs_old_pass
from metrics_page import unknown
from runs import CONFIG, rows, run

# Two mini-batches: the first has groups with variance, so something in its packs.
ONE_RANK = (
    "--parallel.tensor 1 --parallel.sequence false --run.steps 1 --evaluation.every 0 --checkpoint.every 0 "
    "--batch.mini-batches 2 --rollout.max-response-tokens 100"
)
RUNS = {
    "plain": "",
    "sampled": "--rollout.old-log-probs sampled",
    "one step": "--batch.mini-batches 1 --loss.calibrate 0",
    "gate": "--batch.mini-batches 1 --loss.calibrate 0 --correction.name length_fair_gate "
    "--correction.c 1e-7",
    "one step, sampled": "--batch.mini-batches 1 --rollout.old-log-probs sampled",
    "top-p": "--rollout.top-p 0.6",
    "measured": "--rollout.old-log-probs sampled --batch.mini-batches 4 --loss.calibrate 1 "
    "--loss.drift none --optimizer.warmup-steps 0 --run.steps 2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mismatch")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Run → metrics of its step, and what it printed."""
    found = {}
    for name, words in RUNS.items():
        word = name.replace(", ", "-").replace(" ", "-")
        result = run(folder, word, *ONE_RANK.split(), *words.split(), nproc=1)
        assert result.returncode == 0, f"{name}: {why(result.stderr)}"
        found[name] = rows(folder, word)[-1], result.stdout
    return found


Done = dict[str, tuple[dict[str, Any], str]]


@pytest.mark.slow
def test_the_band_is_measured_after_updates_and_not_from_mismatch_alone(done: Done, folder: Path) -> None:
    """Before any update S is 1e-6; where that was half of the responses, c was as small."""
    batches: list[list[float]] = []
    spread: list[float] = []
    for step in read_rows(folder / "measured/sequences.jsonl"):
        by_update: dict[int, list[float]] = {}
        for update, length, s in zip(step["update"], step["length"], step["log_ratio_sum"], strict=True):
            by_update.setdefault(update, []).append(abs(s) / math.sqrt(length))
        still = {update for update, values in by_update.items() if max(values) < 1e-4}
        assert min(by_update) in still
        moved = [value for update, values in by_update.items() if update not in still for value in values]
        spread.append(median(moved) / 0.6745)
        batches += [values for update, values in by_update.items() if update not in still]
    (first, *_) = re.findall(r"clip band: c_low = ([\d.e-]+),", done["measured"][1])
    sigma = median(value for values in batches[:3] for value in values) / 0.6745
    assert float(first) == pytest.approx(2 * sigma, rel=1e-3)
    assert done["measured"][0]["fspo/sigma_hat"] == pytest.approx(spread[-1], rel=1e-4)


@pytest.mark.slow
def test_the_log_has_alarms_and_what_a_correction_leaves(done: Done) -> None:
    assert unknown({name for row, _ in done.values() for name in row}) == []
    for name in ("plain", "gate"):
        row, out = done[name]
        assert row["rollout/mismatch_alarm"] == 0 and "Likely cause" not in out
        little = [line for line in out.splitlines() if "responses a mean weight of" in line]
        assert len(little) == (name == "gate") and all("correction.c = " in line for line in little)
    row, out = done["top-p"]
    assert row["rollout/mismatch_alarm"] == 1
    (line,) = [line for line in out.splitlines() if "Likely cause" in line]
    assert line.startswith("step 1: sampler and trainer differ by ") and "rollout.top_p = 0.6" in line


@pytest.mark.slow
def test_sampled_old_log_probs_need_no_pass(done: Done) -> None:
    """The embedded sampler's are the trainer's to fp32, so all that is learned is the same."""
    (plain, _), (sampled, _) = done["plain"], done["sampled"]
    assert "timing_s/old_log_prob" in plain and "timing_s/old_log_prob" not in sampled
    assert plain["fspo/on_policy_abs_s_max"] == 0
    absent = {"rollout/logprob_abs_diff/mean", "rollout/mismatch_alarm", "fspo/on_policy_abs_s_max"}
    absent |= {"actor/ppo_kl/on_policy", "fspo/kl_k3/on_policy"}
    assert plain["actor/ppo_kl/on_policy"] == plain["fspo/kl_k3/on_policy"] == 0 < plain["fspo/kl_k3"]
    assert absent <= plain.keys() and not absent & sampled.keys()
    # Measured by the first update: all there is without a pass.
    for name in ("rollout/kl_k1", "rollout/mismatch_sigma"):
        assert 0 < abs(sampled[name]) < 1e-4, name
    assert sampled["rollout/mismatch_outliers"] < 0.5
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert sampled[name] == pytest.approx(plain[name], rel=1e-2, abs=1e-5), name


@pytest.mark.slow
def test_a_gate_that_drops_the_most_leaves_little_to_learn(done: Done) -> None:
    (plain, _), (gate, _) = done["one step"], done["gate"]
    assert not any(name.startswith("rollout/correction") for name in plain)
    kept = gate["rollout/correction_weight_mean"]
    assert kept == pytest.approx(1 - gate["rollout/correction_dropped"]) and kept < 0.6
    assert gate["actor/grad_norm"] < 0.9 * plain["actor/grad_norm"]
    assert gate["rollout/correction_ess"] == pytest.approx(kept)
    assert gate["fspo/nonfinite"] == 0


@pytest.mark.slow
def test_a_single_optimizer_step_takes_a_pass_for_a_correction_only(done: Done) -> None:
    (plain, _), (gate, _) = done["one step"], done["gate"]
    assert "timing_s/old_log_prob" not in plain and "timing_s/old_log_prob" in gate
    assert plain["fspo/on_policy_abs_s_max"] == gate["fspo/on_policy_abs_s_max"] == 0
    # It is on-policy, so no off-policy KL exists, rather than one of 0.
    assert plain["fspo/kl_k3"] is None and plain["fspo/kl_k3/on_policy"] == 0
    assert plain["actor/entropy"] > 0
    # From the sampler's log-probs even the only step has an S, and a clip rate.
    assert "fspo/sigma_hat" not in plain and done["one step, sampled"][0]["fspo/sigma_hat"] > 0


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--batch.mini-batches 2", True),
        ("--batch.epochs 2", True),
        ("", False),
        ("--rollout.engine vllm", True),
        ("--correction.name token_tis", True),
        ("--rollout.old-log-probs sampled", False),
        ("--rollout.old-log-probs sampled --rollout.engine vllm --batch.epochs 2", False),
    ],
)
def test_when_the_trainer_scores_before_it_learns(words: str, needed: bool) -> None:
    one = "--batch.mini-batches 1 --batch.epochs 1 --loss.calibrate 0"
    assert needs_old_pass(load_config(REPO / CONFIG, [*one.split(), *words.split()])) is needed
