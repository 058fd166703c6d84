"""Rates and spread over records whose numbers were worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fspo.lab.explain.dump import read_dump
from megatron_fspo.objective.surrogate import LossTerms
from megatron_fspo.record.records import Recorder, SequenceRecord, as_tensors, clip_metrics, estimate_sigma
from megatron_fspo.record.tokens import drop_later, write_tokens
from mismatch_cases import record, sample
from packs import collate

ALONE: Any = SimpleNamespace(size=lambda: 1)
# Two lengths, so two bins: 4 records of L = 4, 6 of L = 100.
SHORT = [
    record(4, 0.2, 1.0, clipped_high=1.0, out_of_band=True),
    record(4, 0.2, -1.0, dual_clipped=1.0, out_of_band=True),
    record(4, 0.1, 1.0),
    record(4, -0.2, 0.0, out_of_band=True),  # A = 0: outside, but never clipped
]
LONG = [
    record(100, -1.0, -1.0, clipped_low=1.0, out_of_band=True),
    record(100, 1.0, 1.0),
    record(100, -1.0, 1.0),
    record(100, 1.0, -1.0),
    record(100, -1.0, 1.0),
    record(100, 0.5, 0.0),
]
DROPPED = [
    record(50, math.nan, 1.0, nonfinite=True),
    record(50, 3.0, math.nan, nonfinite=True),
    record(0, 0.0, 1.0),
]


def test_rates_by_hand() -> None:
    metrics = clip_metrics([*SHORT, *DROPPED, *LONG], samples=1, seed=1)
    by_hand = {
        "actor/pg_clipfrac": 2 / 8,
        "fspo/clip_low": 1 / 8,
        "fspo/clip_high": 1 / 8,
        "fspo/dual_clip_frac": 1 / 8,
        "fspo/out_of_band": 4 / 10,
        # In band: 1 of 4 short, 5 of 6 long, 6 of 10 in all.
        "fspo/lre_mean": 0.4 * abs(0.25 / 0.6 - 1) + 0.6 * abs((5 / 6) / 0.6 - 1),
        "fspo/lre_max": abs(0.25 / 0.6 - 1),
        # Not clipped, of those with an advantage: 1 of 3 short, 4 of 5 long, 5 of 8 in all.
        "fspo/lre_signed_mean": 3 / 8 * abs((1 / 3) / (5 / 8) - 1) + 5 / 8 * abs(0.8 / (5 / 8) - 1),
        "fspo/lre_signed_max": abs((1 / 3) / (5 / 8) - 1),
        # A > 0: 1 of 2 short and 3 of 3 long, 4 of 5; A < 0: 0 of 1 and 1 of 2, 1 of 3.
        "fspo/lre_within_sign": (2 * (1 - 0.5 / 0.8) + 3 * (1 / 0.8 - 1) + 1 * 1 + 2 * (0.5 * 3 - 1)) / 8,
        "fspo/reweighting_sign": 5 / 8 * (0.8 / (5 / 8) - 1) + 3 / 8 * (1 - (1 / 3) / (5 / 8)),
        # All in one optimizer step.
        "fspo/lre_within_update": 3 / 8 * abs((1 / 3) / (5 / 8) - 1) + 5 / 8 * abs(0.8 / (5 / 8) - 1),
        "fspo/reweighting_update": 0.0,
        # |S|/√L: .1 .1 .05 .1 | .1 .1 .1 .1 .1 .05, whose median is .1
        "fspo/sigma_hat": 0.1 / 0.6744897501960817,
        # median |S|: .2 at L = 4, 1 at L = 100
        "fspo/exponent_fit": math.log(1.0 / 0.2) / math.log(100 / 4),
        "fspo/clip_rate/bin_0": 3 / 4,
        "fspo/clip_rate/length_0": 4.0,
        "fspo/clip_rate/bin_1": 1 / 6,
        "fspo/clip_rate/length_1": 100.0,
    }
    assert metrics.keys() == by_hand.keys() | {"fspo/lre_null", "fspo/lre_signed_null"}
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand)


def test_sides_and_weights_by_length() -> None:
    weights = [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    records = [
        replace(one, ratio=weight, below=one.out_of_band and one.log_ratio_sum < 0)
        for one, weight in zip([*SHORT, *LONG], weights, strict=True)
    ]
    metrics = clip_metrics([*records, *DROPPED], samples=1, seed=1)
    by_hand = {
        **{"fspo/below/bin_0": 1 / 4, "fspo/above/bin_0": 2 / 4, "fspo/ess/bin_0": 1 / 3},
        **{"fspo/below/bin_1": 1 / 6, "fspo/above/bin_1": 0.0, "fspo/ess/bin_1": 6**2 / (5 * 10)},
    }
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand)


def test_sigma_is_around_the_centre_of_the_band() -> None:
    """At 8,000 tokens and σ = .02 and .03, |S| alone is 1.4 and 1.8 times as wide."""
    generator = torch.Generator().manual_seed(1)
    records = [
        replace(
            record(8000, spread * 8000**0.5 * z - spread**2 / 2 * 8000, 1.0),
            update=update,
            drift=-(spread**2) / 2,
        )
        for update, spread in ((2, 0.02), (3, 0.03))
        for z in torch.randn(2000, generator=generator, dtype=torch.float64).tolist()
    ]
    around = clip_metrics(records, samples=1, seed=1)["fspo/sigma_hat"]
    raw = clip_metrics([replace(one, drift=0.0) for one in records], samples=1, seed=1)["fspo/sigma_hat"]
    assert around == pytest.approx(0.0244, rel=0.05) and raw > 1.5 * around


def test_what_was_dropped_or_is_empty_counts_nowhere() -> None:
    assert clip_metrics([*SHORT, *DROPPED, *LONG], samples=1, seed=1) == clip_metrics(
        [*SHORT, *LONG], samples=1, seed=1
    )
    assert clip_metrics(DROPPED, samples=1, seed=1) == {}
    assert [r.counts for r in DROPPED] == [False, False, False] and all(r.counts for r in SHORT)


def test_the_null_floor_is_the_chance_level_of_prompts() -> None:
    """Two lengths of 50 prompts, half of them outside: a_1 − a_2 has the deviation √(2 · ¼ / 49)."""
    cases = [(length, number) for length in (3, 9) for number in range(50)]
    records = [
        replace(
            record(length, 0.1, 1.0, out_of_band=number % 2 == 0), sample=length * 1000 + 2 * number + twin
        )
        for length, number in cases
        for twin in (0, 1)
    ]
    null = clip_metrics(records, samples=2, seed=1)["fspo/lre_null"]
    assert null == pytest.approx(math.sqrt(2 / math.pi) * math.sqrt(0.5 / 49), rel=0.2)


def test_nobody_has_an_advantage() -> None:
    metrics = clip_metrics([record(4, 0.1, 0.0, out_of_band=True), record(9, 0.1, 0.0)], samples=1, seed=1)
    assert metrics["fspo/out_of_band"] == 0.5 and math.isnan(metrics["actor/pg_clipfrac"])
    assert math.isnan(metrics["fspo/lre_signed_mean"])


def test_sigma() -> None:
    records = [record(4, 0.2, 1.0), record(16, -0.4, 1.0), record(100, math.inf, 1.0), record(0, 0.0, 1.0)]
    assert estimate_sigma(records) == pytest.approx(0.1 / 0.6744897501960817)
    assert estimate_sigma(records, exponent=0.0) == pytest.approx(0.3 / 0.6744897501960817)
    assert estimate_sigma(records[2:]) is None and estimate_sigma([]) is None


def test_records_carry_what_the_loss_said() -> None:
    samples = [
        replace(sample(i, [-1.0] * length), advantage=advantage)
        for i, (length, advantage) in enumerate([(3, 0.5), (2, -0.5), (4, 0.25)])
    ]
    batch = collate(samples, [0, 2], num_sequences=3, num_tokens=9)
    terms = LossTerms(
        log_ratio_sum=torch.tensor([1.5, -math.inf]),
        weight=torch.zeros(9),
        ratio=torch.tensor([0.0, 2.5]),
        objective=torch.tensor(0.0),
        clipped_low=torch.tensor([0.0, 0.25]),
        clipped_high=torch.tensor([1.0, 0.5]),
        dual_clipped=torch.tensor([0.0, 0.125]),
        out_of_band=torch.tensor([True, False]),
        nonfinite=torch.tensor([False, True]),
    )
    recorder = Recorder(1)
    assert recorder.records(rank=3) == []
    recorder(batch, terms, torch.zeros(9))
    one, two = recorder.records(rank=3)
    assert one == record(3, 1.5, 0.5, rank=3, clipped_high=1.0, out_of_band=True, ratio=0.0)
    clips = {"clipped_low": 0.25, "clipped_high": 0.5, "dual_clipped": 0.125}
    assert two == record(4, -math.inf, 0.25, sample=2, rank=3, nonfinite=True, ratio=2.5, **clips)
    s, lengths = as_tensors([one, two])
    assert s.tolist() == [1.5, -math.inf] and s.dtype == torch.float64 and lengths.tolist() == [3, 4]


def test_tokens_of_context_ranks_make_whole_responses(tmp_path: Path) -> None:
    """Every other sample is kept; two ranks hold zigzag chunks of each, and what explain reads is S again."""
    samples = [sample(i, [-1.0] * length) for i, length in enumerate((3, 2, 9, 14))]
    totals = {"num_sequences": 4, "num_tokens": 28}
    whole = collate(samples, [0, 1, 2, 3], **totals)
    generator = torch.Generator().manual_seed(0)
    drawn = {n: torch.rand(2, 40, generator=generator) - 0.5 for n in range(4)}  # by position, ratio and old
    pieces = []
    for rank in (1, 0):
        batch = collate(samples, [0, 1, 2, 3], **totals, context_rank=rank, context_size=2)
        at = zip(batch.segment.tolist(), batch.position_ids[0], strict=True)
        both = torch.stack([drawn.get(n, torch.zeros(2, 40))[:, position] for n, position in at])
        recorder = Recorder(3, every=2)
        recorder(replace(batch, old_log_probs=both[:, 1] - 1), _terms(4), both[:, 0])
        pieces += recorder.pieces()
    (tmp_path / "run").mkdir()
    write_tokens(tmp_path / "run", 7, 2, pieces)
    dump = read_dump(tmp_path / "run/tokens", {}, step=7)
    assert dump.lengths.tolist() == [3, 9] and dump.updates.tolist() == [3, 3] and dump.clusters_count == 2
    assert dump.log_ratio is not None and dump.old_log_probs is not None
    want = [drawn[n][:, whole.position_ids[0][(whole.segment == n) & whole.loss_mask]] for n in (0, 2)]
    for column, found in ((0, dump.log_ratio), (1, dump.old_log_probs + 1)):
        wanted = torch.cat([part[column] for part in want])
        torch.testing.assert_close(found.float(), wanted, atol=1e-6, rtol=0)
    drop_later(tmp_path / "run", 7)
    assert [path.name for path in (tmp_path / "run/tokens").iterdir()] == ["step_000007.parquet"]
    drop_later(tmp_path / "run", 6)
    assert not list((tmp_path / "run/tokens").iterdir())


def _terms(count: int) -> LossTerms:
    flat = torch.zeros(count)
    names = ("clipped_low", "clipped_high", "dual_clipped", "log_ratio_sum", "ratio", "weight")
    flags = dict.fromkeys(("out_of_band", "nonfinite"), flat > 0)
    return LossTerms(objective=flat.sum(), **dict.fromkeys(names, flat), **flags)


def test_records_say_how_much_of_s_is_at_flipped_tokens() -> None:
    samples = [sample(i, [-1.0] * length) for i, length in enumerate((3, 2))]
    batch = replace(collate(samples, [0, 1], num_sequences=2, num_tokens=5), router=object())
    flat = torch.zeros(2)
    terms = LossTerms(
        log_ratio_sum=torch.tensor([0.75, 1.0]),
        weight=torch.zeros_like(batch.labels),
        ratio=flat,
        objective=flat.sum(),
        **dict.fromkeys(("clipped_low", "clipped_high", "dual_clipped"), flat),
        **dict.fromkeys(("out_of_band", "nonfinite"), flat > 0),
    )
    recorder = Recorder(1)
    log_ratio = torch.full(batch.labels.shape, math.nan)
    log_ratio[batch.loss_mask] = torch.tensor([0.5, 0.25, 0.0, -1.0, 2.0])
    flipped = torch.ones_like(batch.loss_mask)
    flipped[batch.loss_mask] = torch.tensor([True, False, True, False, True])
    recorder(batch, terms, log_ratio)
    one, two = recorder.records(rank=0, flipped=[flipped], group=ALONE)
    assert (one.flipped, one.flipped_log_ratio_sum) == (2, 0.5)
    assert (two.flipped, two.flipped_log_ratio_sum) == (1, 2.0)
    assert [r.flipped for r in recorder.records(rank=0)] == [0, 0]


def test_the_effective_sample_size_is_that_of_the_importance_weights() -> None:
    """By hand: weights 1, 1, 2 and one that is clipped; A = 0, dropped and empty responses do not count."""
    weighed = [
        *(record(4, 0.0, a, ratio=w) for a, w in ((1.0, 1.0), (-2.0, 1.0), (0.5, 2.0))),
        record(4, 9.0, 1.0, clipped_high=1.0, ratio=0.0),
        record(4, 0.0, 0.0, ratio=50.0),
        record(4, math.nan, 1.0, nonfinite=True, ratio=0.0),
        record(0, 0.0, 1.0, ratio=70.0),
    ]

    def shares(records: list[SequenceRecord]) -> dict[str, float]:
        metrics = clip_metrics(records, samples=1, seed=1)
        return {key: metrics[key] for key in ("fspo/ess", "fspo/weight_max_share") if key in metrics}

    assert shares(weighed) == pytest.approx({"fspo/ess": 16 / (4 * 6), "fspo/weight_max_share": 0.5})
    assert shares([*weighed, record(4, 0.0, 1.0)]) == {}, "tokens have weights of their own"
    nothing = shares([record(4, 9.0, 1.0, clipped_high=1.0, ratio=0.0)])
    assert len(nothing) == 2 and all(math.isnan(value) for value in nothing.values())
