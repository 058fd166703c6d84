"""Figures of a sweep from folders whose numbers are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import REPO
from megatron_fspo.lab.report.history import History
from megatron_fspo.lab.report.samples import AccuracyChange, accuracy_change, first_and_last_samples
from megatron_fspo.lab.sweep.file import Sweep
from megatron_fspo.lab.sweep.summary import summarize, table


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def change_of(folder: Path) -> AccuracyChange | None:
    history = History(folder)
    return accuracy_change(history, first_and_last_samples(folder, history))


def write_run(folder: Path, *, outside: Sequence[bool], reward: float) -> None:
    """Two steps of eight sequences, and an evaluation before and after: two prompts, two responses each."""
    steps = [
        {"step": n, "critic/rewards/mean": reward * n, "response_length/mean": 10.0, "fspo/c_high": 0.03}
        for n in (1, 2)
    ]
    before, after = ({"step": n, "val/x/mean@2": score} for n, score in ((0, 0.5), (2, 0.75)))
    write(folder / "metrics.jsonl", [before, *steps, after])
    columns = {
        "length": [5] * 4 + [40] * 4,
        "log_ratio_sum": [0.1] * 8,
        "advantage": [1.0] * 8,
        "clipped": [0.0] * 8,
        "out_of_band": list(outside),
        "ratio": [1.1] * 8,
    }
    write(folder / "sequences.jsonl", [{"step": n, **columns} for n in (1, 2)])
    scores = {0: {"a": (1, 0), "b": (0, 1)}, 2: {"a": (1, 1), "b": (0, 1)}}
    rows = [
        {"step": step, "prompt": prompt, "answer": "1", "reward": float(score)}
        for step, prompts in scores.items()
        for prompt, found in prompts.items()
        for score in found
    ]
    write(folder / "samples.jsonl", rows)


def make_sweep(folder: Path, **more: Any) -> Sweep:
    config = (REPO / "examples/make_sum/run.toml",)
    return Sweep(config=config, folder=folder, seeds=(1, 2), arms={"even": {}, "uneven": {}}, **more)


def test_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"even-{seed}", outside=[False, True] * 4, reward=0.1 * seed)
        uneven = [False] * 4 + [True] * (2 + seed) + [False] * (2 - seed)
        write_run(tmp_path / f"uneven-{seed}", outside=uneven, reward=0.1 * seed + 0.05)
    found = summarize(make_sweep(tmp_path, match="even"))
    even, uneven = found["arms"]["even"], found["arms"]["uneven"]
    assert even["out_of_band"]["value"] == 0.5 and uneven["out_of_band"]["value"] == 7 / 16
    assert uneven["lre_mean"]["value"] > even["lre_mean"]["value"]
    assert even["reward_last"]["value"] == pytest.approx(0.225)
    # The seeds differ more than the arms do: paired, the difference is exact.
    gained = found["differences"]["uneven"]["reward_last"]
    assert gained["value"] == pytest.approx(0.075) and gained["half_width"] == pytest.approx(0, abs=1e-12)
    assert (gained["above"], gained["seeds"]) == (2, 2)
    assert "even" not in found["differences"]
    text = table(found, "even")
    assert "| even | 0.500 ± 0.000 |" in text and "uneven less even, LRE mean" in text


def test_the_change_of_accuracy_has_its_interval_where_all_responses_are_kept(tmp_path: Path) -> None:
    write_run(tmp_path, outside=[False] * 8, reward=0.1)
    found = change_of(tmp_path)
    assert found is not None and (found.before, found.after) == (0.5, 0.75)
    assert found.interval is not None
    low, high = found.interval
    assert low <= 0.25 <= high and low < high
    rows = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(rows[:-1]))
    assert change_of(tmp_path) == AccuracyChange(before=0.5, after=0.75, interval=None)
