"""The figures: those of the trainer on recorded runs, those of a hand, and those of the slow formulas."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dumps import LIMITS, RECORDED, fair_rows, token_rows, walks, write
from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.chance import noise_alone
from megatron_fspo.lab.explain.dump import Dump, read_dump
from megatron_fspo.lab.explain.explanation import explain_dump
from megatron_fspo.lab.explain.losses import (
    BAND_LOSSES,
    OUTCOMES,
    factor_for,
    judge,
    known_for,
    reach,
    with_limits,
)
from megatron_fspo.lab.explain.text import _growth, sentences
from megatron_fspo.losses import CTPOLoss, PolicyLossConfig
from megatron_fspo.objective.calibration import Exponent, sigma_hat


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    return read_dump(write(tmp_path / "walks.jsonl", walks(2000)), {})


@pytest.mark.parametrize("name", LIMITS)
def test_a_recorded_run_has_the_figures_of_its_trainer(name: str) -> None:
    for line in (RECORDED / f"{name}.metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        dump = read_dump(RECORDED / f"{name}.sequences.jsonl", {}, step=metrics["step"])
        found = explain_dump(dump, known_for(dump, with_limits(LIMITS[name])))
        (mine,) = (one for one in found.given if one.name == name)
        same = {
            "fspo/out_of_band": mine.out_of_band,
            "actor/pg_clipfrac": mine.clip_low + mine.clip_high,
            "fspo/clip_low": mine.clip_low,
            "fspo/clip_high": mine.clip_high,
            "fspo/dual_clip_frac": mine.dual_clip,
            "fspo/lre_mean": mine.lre.mean,
            "fspo/lre_max": mine.lre.max,
            "fspo/lre_signed_mean": mine.lre_signed.mean,
            "fspo/lre_signed_max": mine.lre_signed.max,
            "fspo/ess": mine.ess,
            "fspo/sigma_hat": found.sigma,
        }
        same |= {f"fspo/clip_rate/bin_{n}": x.out_of_band for n, x in enumerate(mine.by_length)}
        assert same == pytest.approx({key: metrics[key] for key in same}, rel=1e-5), name


@pytest.mark.parametrize(
    ("trainer", "metric", "figure"),
    [
        ("trl", "clip_ratio/low_mean", "clip_low"),
        ("trl", "clip_ratio/high_mean", "clip_high"),
        ("verl", "actor/pg_clipfrac", "clipped_tokens"),  # a mean over tokens
    ],
)
def test_a_dump_of_another_trainer_has_its_figures(trainer: str, metric: str, figure: str) -> None:
    """GSPO of TRL 1.16.0 and of verl 0.9.1, dumped by examples/explain, log-probs rounded to 1e-6."""
    dump = read_dump(RECORDED / f"{trainer}.dump.jsonl", {})
    losses = with_limits(["--gspo.eps-low", "0.003", "--gspo.eps-high", "0.004"])
    (gspo,) = (one for one in explain_dump(dump, losses).given if one.name == "gspo")
    metrics = json.loads((RECORDED / f"{trainer}.metrics.jsonl").read_text(encoding="utf-8"))
    assert getattr(gspo, figure) == pytest.approx(metrics[metric], rel=1e-6)
    assert metrics[metric] > 0


@pytest.mark.parametrize(
    ("prompts", "samples", "times", "named"),
    [(240, 1, 1, "prompt"), (120, 1, 4, "response"), (30, 8, 2, "prompt")],
)
def test_a_fair_fspo_is_seldom_said_to_depend_on_length(
    tmp_path: Path, prompts: int, samples: int, times: int, named: str
) -> None:
    """About 6% of dumps; with rows as independent 11 of 12 for (120, 1, 4) and 5 of 12 for (30, 8, 2)."""
    wrong = 0
    for seed in range(12):
        rows = fair_rows(prompts, samples, times, seed=seed)
        rows = [{named if key == "prompt" else key: value for key, value in row.items()} for row in rows]
        found = explain_dump(read_dump(write(tmp_path / "a.jsonl", rows), {}), BAND_LOSSES[:1], rate=0.2)
        assert found.dump.clustered_by == named and len(found.dump.clusters.unique()) == prompts
        wrong += found.matched[0].lre.mean_interval[0] > found.matched[0].lre.null_mean
    assert wrong <= 2


def test_clusters_are_prompts_or_responses_or_rows(tmp_path: Path) -> None:
    def clusters(rows: list[dict[str, Any]]) -> tuple[str, list[int]]:
        dump = read_dump(write(tmp_path / "a.jsonl", rows), {})
        return dump.clustered_by, dump.clusters.tolist()

    row = {"length": 3, "log_ratio_sum": 0.1, "advantage": 1.0}
    assert clusters([row, row]) == ("row", [0, 1])
    assert clusters([{**row, "response": x} for x in ("a", "b", "a")]) == ("response", [0, 1, 0])
    named = [{**row, "response": x, "uid": y} for x, y in (("a", 1), ("b", 1), ("c", 2))]
    assert clusters(named) == ("prompt", [0, 0, 1])
    assert clusters([{**one, "uid": 1} for one in named]) == ("response", [0, 1, 2])
    # The sampler's log-probs of a response are the same in every update.
    tokens = {"log_probs": [-1.5], "old_log_probs": [-1.0], "advantage": 1}
    others = {"log_probs": [-2.0]}, {"old_log_probs": [-2.0]}
    assert clusters([tokens, *(tokens | other for other in others)])[1] == [0, 0, 1]
    steps = {"length": [3, 4, 5], "log_ratio_sum": [0.1] * 3, "advantage": [1.0] * 3, "prompt": [0, 0, 1]}
    assert clusters([steps, steps]) == ("prompt", [0, 0, 1, 2, 2, 3])  # places in the rollout of a step
    with pytest.raises(InputError, match="prompt is in some rows"):
        clusters([{**row, "prompt": "x"}, row])


def test_limits_of_a_ratio_beyond_what_float64_holds(tmp_path: Path) -> None:
    dump = read_dump(write(tmp_path / "a.jsonl", walks(400, sigma=1.0, longest=4000)), {})
    losses = with_limits(["--fspo.c-low", "2", "--fspo.c-high", "2", "--fspo.c-dual", "3"])[:3]
    found = explain_dump(dump, losses, 0.05)
    rloo = found.matched[2]
    assert rloo.limits["eps_low"] < 1 and rloo.out_of_band > 0.08
    assert any("rloo" in line and "float64" in line for line in sentences(found))


def test_ctpo_is_its_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = token_rows(60)
    dump = read_dump(write(tmp_path / "a.jsonl", rows), {})
    (loss,) = (loss for loss in BAND_LOSSES if isinstance(loss, CTPOLoss))
    found = judge(loss, dump)
    assert torch.equal(reach(loss, dump) > 1, found.outside) and 0 < found.outside.sum() < 60
    for number, row in enumerate(rows):
        new, old = (torch.tensor(row[name], dtype=torch.float64) for name in ("log_probs", "old_log_probs"))
        log_ratio = (new - old).requires_grad_()
        by_hand = loss.definition(log_ratio, row["advantage"], new)
        (slope,) = torch.autograd.grad(by_hand.objective.sum(), log_ratio)
        assert found.outside[number].item() == by_hand.out_of_band
        assert found.clipped[number].item() == pytest.approx(by_hand.clipped)
        # J is a mean over the tokens of all responses, and weights are those of N·J.
        mean = len(dump) / dump.lengths.sum().item()
        assert found.mass[number].item() == pytest.approx(slope.abs().sum().item() * mean)
        weights = found.weights[found.owner == number]
        assert torch.allclose(weights * abs(row["advantage"]), slope.abs() * mean)
    wide = loss.scaled(1.5)
    assert torch.equal(reach(loss, dump) > 1.5, judge(wide, dump).outside)
    # Blocks of tokens make no difference.
    monkeypatch.setattr("megatron_fspo.lab.explain.losses._BLOCK_TOKENS", 100)
    in_blocks = judge(loss, dump)
    for field in dataclasses.fields(found):
        one, other = getattr(in_blocks, field.name), getattr(found, field.name)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_fates_by_hand(tmp_path: Path) -> None:
    # At L = 4 and 400 c√L with c = .06 is .12 and 1.2, RLOO's edge .18, GSPO's .0016 and .16.
    names = ("length", "log_ratio_sum", "advantage")
    known = [(4, 0.2, 1.0), (4, 0.2, 0.0), (4, 0.2, -1.0), (400, 0.4, 1.0), (400, 0.1, 1.0)]
    rows = [dict(zip(names, values, strict=True)) for values in known]
    dump = read_dump(write(tmp_path / "a.jsonl", rows), {})
    given = with_limits(["--fspo.c-low", ".06", "--fspo.c-high", ".06", "--fspo.c-dual", ".09"])
    losses = known_for(dump, given)[:3]
    outcomes = [[OUTCOMES[code] for code in judge(loss, dump).outcomes(dump.advantages)] for loss in losses]
    assert outcomes == [
        ["clipped", "no advantage", "clipped", "kept", "kept"],  # the third by the dual clip
        ["clipped", "no advantage", "kept", "clipped", "kept"],
        ["clipped", "no advantage", "kept", "clipped", "kept"],
    ]
    found = explain_dump(dump, losses)
    pairs = {(one.kept_by, one.clipped_by): one for one in found.disagreements}
    assert pairs["fspo", "gspo"].responses == 1 and pairs["fspo", "gspo"].examples == (4,)
    assert pairs["fspo", "gspo"].share == 0.25 and pairs["fspo", "gspo"].lengths == (400, 400, 400)
    assert pairs["gspo", "fspo"].examples == (3,) and pairs["gspo", "fspo"].rising == 0.0
    assert pairs["gspo", "rloo"].responses == 0
    # What is kept: e^.4·1·400 and e^.1·1·400 of FSPO's gradient; each |A|·e^(S/L) of GSPO's.
    fspo, gspo, _ = found.given
    assert [x.mass for x in fspo.by_length] == [0.0, 1.0]
    held = math.exp(0.2 / 4)
    assert gspo.by_length[0].mass == pytest.approx(held / (held + math.exp(0.1 / 400)))
    assert fspo.clipped == 0.5 and fspo.clipped_tokens == pytest.approx(8 / 812)


@pytest.mark.parametrize("loss", [*BAND_LOSSES[:3], BAND_LOSSES[0].with_band(drift=-0.001)])
def test_scaled_limits_give_the_rate_that_was_asked_for(dump: Dump, loss: PolicyLossConfig) -> None:
    far = reach(loss, dump)
    assert torch.equal(far > 1, judge(loss, dump).outside)
    for rate in (0.001, 0.1, 0.5, 0.9):
        same = loss.scaled(factor_for(far, rate))
        assert judge(same, dump).outside.double().mean().item() == pytest.approx(rate, abs=1e-9)


def test_responses_that_leave_the_band_together() -> None:
    far = torch.tensor([0.5, 2.0, 2.0, 2.0, 3.0], dtype=torch.float64)
    assert factor_for(far, 0.2) == factor_for(far, 0.4) == 2.5
    assert factor_for(far, 0.6) == factor_for(far, 0.9) == 1.25
    assert factor_for(far, 0.05) > 3.0


def test_reach_is_where_decisions_change(tmp_path: Path) -> None:
    """Scaled to just below and above its reach, a loss has the response outside, or not."""
    dump = read_dump(write(tmp_path / "a.jsonl", token_rows(60)), {})
    for loss in BAND_LOSSES:
        far = reach(loss, dump)
        for number in range(0, 60, 7):
            for factor, outside in ((0.999, True), (1.001, False)):
                scaled = loss.scaled(factor * far[number].item())
                assert bool(judge(scaled, dump).outside[number]) is outside, (loss.name, number)
        assert not judge(loss.scaled(min(1e6, loss.widest())), dump).outside.any(), loss.name


def test_losses_are_compared_at_one_rate(dump: Dump) -> None:
    found = explain_dump(dump, BAND_LOSSES[:3], rate=0.1)
    fspo, gspo, rloo = found.matched
    assert fspo.lre.mean < 2 * fspo.lre.null_mean < min(gspo.lre.mean, rloo.lre.mean)
    assert sum(x.mass for x in fspo.by_length) == pytest.approx(1)


def test_noise_from_tokens_and_from_the_sampler(tmp_path: Path) -> None:
    rows = token_rows(300)
    measured, source = noise_alone(read_dump(write(tmp_path / "a.jsonl", rows), {}))
    assert source == "sampler"
    by_hand = [sum(row["old_log_probs"]) - sum(row["sampled_log_probs"]) for row in rows]
    assert measured.log_ratio_sum.tolist() == pytest.approx(by_hand)
    assert measured.log_ratio is not None and measured.old_log_probs is not None
    known = torch.cat([torch.tensor(row["old_log_probs"], dtype=torch.float64) for row in rows])
    torch.testing.assert_close(measured.old_log_probs + measured.log_ratio, known)
    for row in rows:
        del row["sampled_log_probs"]
    dump = read_dump(write(tmp_path / "b.jsonl", rows), {})
    flipped, source = noise_alone(dump)
    assert source == "signs"
    assert dump.log_ratio is not None and flipped.log_ratio is not None
    assert torch.equal(flipped.log_ratio[: len(dump.log_ratio)].abs(), dump.log_ratio.abs())
    spread = sigma_hat(flipped.log_ratio_sum, flipped.lengths)
    assert spread == pytest.approx(0.02, rel=0.1)


def test_noise_without_tokens_is_a_normal_walk(dump: Dump) -> None:
    noise, source = noise_alone(dump)
    assert source == "normal" and len(noise) % len(dump) == 0
    sigma = sigma_hat(dump.log_ratio_sum, dump.lengths)
    expected = 2 * torch.special.ndtr(torch.tensor(-0.03 / sigma)).item()
    found = explain_dump(dump, BAND_LOSSES[:3])
    assert found.given[0].noise == pytest.approx(expected, rel=0.05)
    assert isinstance(found.exponent, Exponent)
    assert found.exponent.interval[0] < 0.5 < found.exponent.interval[1]


@pytest.mark.parametrize(
    ("of", "longest", "said"),
    [
        ("tokens", 2000, "Var(S) grows as L, as with independent tokens: |S| grows as L^0.5"),
        ("shift", 2000, "Var(S) grows as L², as with a shift that all tokens share: |S| grows as L^"),
        (
            "decisions",
            2000,
            "Var(S) does not grow with L, as with a fixed number of decisions: |S| grows as L^",
        ),
        ("tokens", 50, "How Var(S) grows with L is not measured: the lengths span too little"),
    ],
)
def test_the_growth_of_s_names_the_band(of: str, longest: int, said: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(800):
        length = int(20 * (longest / 20) ** torch.rand((), generator=generator).item())
        tokens = 0.02 * torch.randn(length, generator=generator, dtype=torch.float64)
        if of == "shift":
            tokens += 0.02 * torch.randn((), generator=generator, dtype=torch.float64)
        if of == "decisions":  # twenty tokens, spread over the response; the others are certain
            tokens *= torch.arange(length) * 20 % length < 20
        rows.append({"length": length, "log_ratio_sum": tokens.sum().item(), "advantage": 1.0})
    found = explain_dump(read_dump(write(tmp_path / "dump.jsonl", rows), {}), BAND_LOSSES[:1])
    (sentence,) = [line for line in sentences(found) if "Var(S)" in line]
    assert sentence.startswith(said)
    bands = {"tokens": "a √L band", "shift": "a band that grows as L", "decisions": "a constant band"}
    assert (f"So {bands[of]} (exponent" in sentence) == (longest > 50)


def test_a_growth_between_two_laws_names_both() -> None:
    said = _growth(Exponent(value=0.3, interval=(0.2, 0.4), span=9.0))
    assert "does not grow" in said and "it grows as L, " in said and "band" not in said
    assert said.endswith("which is open: |S| grows as L^0.30 [0.20, 0.40].")


def test_dumps_too_small_or_too_large_for_a_figure(tmp_path: Path) -> None:
    for rows in (token_rows(60), walks(2), walks(60)):
        few = explain_dump(read_dump(write(tmp_path / "b.jsonl", rows), {}), BAND_LOSSES[:1])
        assert few.parts is None and isinstance(few.exponent, str)
        assert not any("grows as" in line for line in sentences(few))
    rows = [*walks(100), {"length": 9, "log_ratio_sum": 800.0, "advantage": -1.0}]
    far = read_dump(write(tmp_path / "a.jsonl", rows), {})
    found = explain_dump(far, BAND_LOSSES[:3])
    assert [one.dropped for one in found.given] == [0, 0, 1]  # FSPO's dual clip takes it; exp(S/L) is finite
    assert OUTCOMES[found.decisions[2].outcomes(far.advantages)[-1]] == "dropped"
