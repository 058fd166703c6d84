"""Flipped routes: their part of S and of the clips, on walks whose tokens flip with a known jump."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dumps import token_rows, walks, write
from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.lab.explain.dump import read_dump
from megatron_fspo.lab.explain.explanation import Explanation, explain_dump
from megatron_fspo.lab.explain.losses import BAND_LOSSES, known_for
from megatron_fspo.lab.explain.page import write_page
from megatron_fspo.lab.explain.text import as_json, render
from megatron_fspo.objective.calibration import Exponent

SIGMA, JUMP, RATE = 0.02, 0.1, 0.05


def with_flips(count: int) -> list[dict[str, Any]]:
    """S = walk + Σ over flipped tokens of Normal(0, JUMP²), with a drift of 0.002 a token in both."""
    generator = torch.Generator().manual_seed(1)
    rows = walks(count, sigma=SIGMA)
    for row in rows:
        flipped = int((torch.rand(row["length"], generator=generator) < RATE).sum())
        z = torch.randn((), generator=generator, dtype=torch.float64).item()
        part = JUMP * math.sqrt(flipped) * z + 0.002 * flipped
        s = row["log_ratio_sum"] + 0.002 * (row["length"] - flipped) + part
        row |= {"log_ratio_sum": s, "flipped": flipped, "flipped_log_ratio_sum": part}
    return rows


def explained(folder: Path, rows: list[dict[str, Any]]) -> Explanation:
    dump = read_dump(write(folder / "dump.jsonl", rows), {})
    return explain_dump(dump, known_for(dump, BAND_LOSSES))


def test_the_part_that_was_put_in(tmp_path: Path) -> None:
    found = explained(tmp_path, with_flips(4000))
    flips = found.flips
    assert flips is not None and flips.all.tokens == pytest.approx(RATE, rel=0.05)
    true = RATE * JUMP**2 / (SIGMA**2 + RATE * JUMP**2)  # 0.56
    share = flips.all.variance
    assert share.value == pytest.approx(true, abs=0.05)
    assert share.low < true < share.high < share.low + 0.15
    # The clip rates as they are, and those of the walk alone.
    walk = explained(tmp_path, [row | {"log_ratio_sum": rest(row)} for row in with_flips(4000)])
    for loss, alone in zip(found.given, walk.given, strict=True):
        assert flips.all.clipped[loss.name] == (loss.clipped, alone.clipped)
        for part, figures, other in zip(flips.by_length, loss.by_length, alone.by_length, strict=True):
            assert part.clipped[loss.name] == (figures.clipped, other.clipped)
    rate, without = flips.all.clipped["fspo"]
    assert rate > 1.5 * without > 0
    assert isinstance(flips.exponent_without, Exponent) and flips.exponent_without == walk.exponent
    text = render(found)
    assert f"{share.value:.1%} [" in text and f"{without:.1%} in place of {rate:.1%}" in text
    content = json.loads(json.dumps(as_json(found)))
    assert content["flips"]["all"]["clipped"]["fspo"] == [rate, without]
    assert len(content["flips"]["by_length"]) == len(content["bins"])
    write_page(found, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count(f"{share.value:.1%} [") == 1
    for part in flips.by_length:
        assert f">{part.variance.value:.1%}</td>" in page


def rest(row: dict[str, Any]) -> float:
    return float(row["log_ratio_sum"] - row["flipped_log_ratio_sum"])


def test_none_or_all_of_the_tokens(tmp_path: Path) -> None:
    rows = walks(400)
    none = [{**row, "flipped": 0, "flipped_log_ratio_sum": 0.0} for row in rows]
    assert as_json(explained(tmp_path, none)) == as_json(explained(tmp_path, rows))
    assert as_json(explained(tmp_path, rows))["flips"] is None
    of_nothing = explained(tmp_path, [*none[1:], none[0] | {"flipped": 1}]).flips  # log-ratio 0
    assert of_nothing is not None and 0 < of_nothing.all.tokens < 1e-3
    assert of_nothing.all.variance == Estimate(value=0, low=0, high=0)
    assert all(rate == without for rate, without in of_nothing.all.clipped.values())
    whole = {"flipped": "length", "flipped_log_ratio_sum": "log_ratio_sum"}
    every = explained(tmp_path, [row | {key: row[of] for key, of in whole.items()} for row in rows]).flips
    assert every is not None and every.all.tokens == every.all.variance.value == 1
    assert every.all.clipped["fspo"][0] > 0 == every.all.clipped["fspo"][1]
    assert isinstance(every.exponent_without, str)


def test_fields_of_steps_and_of_dumps_with_tokens(tmp_path: Path) -> None:
    step = {"length": [5, 6], "log_ratio_sum": [0.1, 0.3], "advantage": [1.0, -1.0]}
    flips = {"flipped": [0, 2], "flipped_log_ratio_sum": [0.0, -0.2]}
    dump = read_dump(write(tmp_path / "steps.jsonl", [step, step | flips]), {})
    assert dump.flipped.tolist() == [0, 0, 0, 2]
    assert dump.flipped_log_ratio_sum.tolist() == [0.0, 0.0, 0.0, -0.2]
    # Which of a prefix's tokens flipped is not known, so CTPO has no figure.
    rows = [{**row, "flipped": 1, "flipped_log_ratio_sum": 0.01} for row in token_rows(40)]
    found = explained(tmp_path, rows)
    assert found.flips is not None
    assert [loss.name for loss in found.given if loss.name not in found.flips.all.clipped] == [
        "ctpo",
        "cppo",
        "pnpo",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"flipped": 1}, "'flipped' alone"),
        ({"flipped_log_ratio_sum": 0.1}, "'flipped_log_ratio_sum' alone"),
        ({"flipped": 4, "flipped_log_ratio_sum": 0.1}, "flipped = 4"),
        ({"flipped": -1, "flipped_log_ratio_sum": 0.1}, "flipped = -1"),
        ({"flipped": 0.5, "flipped_log_ratio_sum": 0.1}, "flipped = 0.5"),
        ({"flipped": 1, "flipped_log_ratio_sum": None}, "flipped_log_ratio_sum = null"),
        ({"flipped": 1, "flipped_log_ratio_sum": math.nan}, "not finite"),
    ],
)
def test_broken_fields_are_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    row = {"length": 3, "log_ratio_sum": 0.1, "advantage": 1.0}
    with pytest.raises(InputError, match=said):
        read_dump(write(tmp_path / "a.jsonl", [row | fields]), {})
