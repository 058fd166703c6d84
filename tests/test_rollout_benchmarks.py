"""What docs/performance.md says of rollouts, and of steps beside TRL's."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import against_trl, async_rollouts, rollout_client
from launch import REPO
from megatron_fspo.rollout.client.answers import read_completion
from megatron_fspo.types import SamplingParams


def measured(name: str) -> tuple[dict[str, Any], str]:
    """The report that is committed, and the page."""
    report = json.loads((REPO / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return report, (REPO / "docs/performance.md").read_text(encoding="utf-8")


def test_sampling_ahead() -> None:
    report, page = measured("async_rollouts")
    assert async_rollouts.table(report) in page
    assert report["command"] in page
    assert f"It finishes {report['steps_ratio']:.2f} times the steps" in page
    assert f"means of two runs of {report['steps']} steps" in page
    assert len(report["runs"]["sync"]) == len(report["runs"]["async"]) == 2


def test_beside_trl() -> None:
    report, page = measured("against_trl")
    assert against_trl.table(report) in page


def test_reading_responses() -> None:
    report, page = measured("rollout_client")
    assert rollout_client.table(report) in page
    assert rollout_client.one_reader(report) in page
    assert report["command"] in page
    assert [row["tokens"] for row in report["lengths"]] == [*rollout_client.LENGTHS]
    assert all(135 < row["bytes_per_token"] < 145 for row in report["lengths"]), "about 140"


def test_the_client_is_measured_with_an_answer_that_it_takes() -> None:
    row = rollout_client.measure(64, count=20, repeats=1)
    assert row["of_json_loads"] > 0
    completion = read_completion(rollout_client.answer(64), SamplingParams(max_tokens=64))
    assert len(completion.log_probs) == 64
