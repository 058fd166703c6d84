"""A rank dies, fails or stands still while others wait for it, and no launcher watches them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from control_worker import SILENCE

from launch import found_by

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
ENOUGH = SILENCE + 20.0  # seconds, on a busy machine
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    worker = Path(__file__).with_name("control_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("lost"), nproc=0, timeout=200)


@pytest.mark.parametrize(
    ("case", "dead", "waited_for"),
    [
        ("follower_dies", 1, "the servers"),
        ("first_dies", 0, "the responses"),
        ("grader_dies", 2, "the grades"),
    ],
)
def test_a_dead_rank_ends_the_others_with_its_name(
    found: Found, case: str, dead: int, waited_for: str
) -> None:
    ranks = found[case]
    assert ranks[dead]["status"] == -9
    name = f"rank {dead} ("
    for rank in (rank for number, rank in enumerate(ranks) if number != dead):
        assert rank["said"].startswith(name) and f"process {ranks[dead]['pid']})" in rank["said"]
        assert "sent no heartbeat for" in rank["said"] and f"waited for {waited_for}" in rank["said"]
        assert SILENCE < rank["seconds"] < 1 + ENOUGH
    if dead == 0:  # whose error is told otherwise
        assert any(f": {name}" in rank["error"] for rank in ranks[1:])


def test_a_rank_that_fails_ends_the_others_at_once_with_its_words(found: Found) -> None:
    first, failed, deaf = found["grader_fails"]
    assert first["said"].startswith("rank 1 (") and first["said"].endswith("ValueError: no such answer")
    assert first["seconds"] < SILENCE  # not by the missing sign of life
    assert failed["status"] == 0
    # In a long call of its own: its process ends, and says why.
    assert deaf["status"] == 1 and deaf["said"] is None
    assert "ValueError: no such answer" in deaf["error"]


def test_a_rank_that_stands_still_for_short_is_waited_for(found: Found) -> None:
    ranks = found["stopped_for_short"]
    assert [(rank["status"], rank["said"], rank["error"]) for rank in ranks] == [(0, "done", "")] * 3


def test_a_rank_that_stands_still_in_a_collective_ends_the_others_with_its_name(found: Found) -> None:
    first, still, last = found["stopped_in_a_collective"]
    for rank in (first, still, last):  # it too, once it goes on
        assert rank["status"] == 1 and f": rank 1 ({HOST}, process {still['pid']})" in rank["error"]
