"""Real jobs whose ranks wait longer than a collective may last, or lose one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import found_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    worker = Path(__file__).with_name("waiting_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("waiting"), nproc=0, timeout=240)


def test_the_first_rank_may_wait_longer_than_a_collective(found: dict[str, list[dict[str, Any]]]) -> None:
    ranks = found["longer_than_a_collective"]
    assert [rank["status"] for rank in ranks] == [0, 0], ranks


def test_an_error_before_a_rank_joins_reaches_the_others(found: dict[str, list[dict[str, Any]]]) -> None:
    first, failed = found["fails_before_it_joins"]
    assert (first["status"], failed["status"]) == (1, 2), found
    assert first["error"].startswith("worker: rank 1 (")
    assert "): data.train = x.jsonl: not there\n" in first["error"]
    assert first["seconds"] < 40


def test_the_others_end_with_the_store(found: dict[str, list[dict[str, Any]]]) -> None:
    killed, other = found["first_is_killed"]
    assert killed["status"] == -9 and other["status"] == 1, found
    assert "the store through which ranks meet is gone" in other["error"]
    assert other["seconds"] < 40
