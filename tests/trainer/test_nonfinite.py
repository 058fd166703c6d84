"""A NaN inside the network: no weight sees it, its response is found, and the others of its pack train on.

On two ranks, in several layouts; see :mod:`nonfinite_worker`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import found_by
from nonfinite_worker import CULPRIT, LAYOUTS, MANY


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("nonfinite_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("nonfinite"), nproc=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_forward_a_nan_stays_in_its_sequence(found: dict[str, Any], layout: str) -> None:
    """Attention takes each sequence of a pack by itself: no 0·NaN of a masked key. To the bit."""
    ranks = found[layout]["scoring"]
    assert {n for rank in ranks for n in rank["broken"]} == {CULPRIT}
    assert {n for rank in ranks for n in rank["moved"]} == {CULPRIT}
    assert max(rank["largest pack"] for rank in ranks) > 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_touches_nothing(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["refused"]:
        assert rank["untouched"], "a weight, a moment or the learning rate has moved"
        assert "optimizer step 2: the gradient is not finite" in rank["raised"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_is_skipped_and_the_next_one_taken(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["one"]:
        assert rank["skipped"] == [True, False] and rank["untouched"] and rank["moved"] and rank["finite"]
        assert rank["broken"] == [CULPRIT] and rank["in a row"] == 0
        named, skipped = rank["said"]
        assert named.startswith("step 3: dropped a sequence that is not finite: prompt 1, response 1 (data-")
        assert (
            "skipped because the gradient is not finite, as are log-probs of prompt 1, response 1" in skipped
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_stop_the_run_before_the_weights_move(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["many"]:
        assert rank["untouched"] and len(rank["said"]) == len(MANY)
        assert "4 of 9 sequences of one optimizer step are not finite" in rank["raised"]
        assert "loss.max_nonfinite_share allows 0.3. The weights are those before" in rank["raised"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_the_backward_pass_alone_is_skipped_too(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["backward"]:
        assert rank["skipped"] == [True, False] and rank["untouched"] and rank["finite"]
        assert rank["broken"] == []
        (skipped,) = rank["said"]
        assert "the gradient is not finite, but every log-prob is" in skipped
