"""A NaN inside the network: no weight sees it, its response is found, and the others of its pack train on.

On two ranks, in several layouts; see :mod:`nonfinite_worker`.
"""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("fault", ["dropped", "once"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_is_the_one_without_the_response(found: dict[str, Any], layout: str, fault: str) -> None:
    """Gradient, S and weights are as if it had never been in a pack; N and T are those of all responses.

    ``once``: the fault is in the training pass alone, and no pass that looks for it meets it again.
    """
    close = 1e-3 if "bfloat16" in layout else 1e-5  # other packs
    for got, want in zip(found[layout][fault], found[layout]["without"], strict=True):
        assert want["moved"] and want["dropped"] == [] and want["nonfinite"] == 0
        assert got["moved"] and got["finite"]
        assert got["dropped"] == [CULPRIT] and got["nonfinite"] == 1
        assert got["totals"] == want["totals"] and want["totals"][1] > want["totals"][2]
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=close)
        assert got["metrics"] == pytest.approx(want["metrics"], rel=close, abs=close)
        assert got["sums"].keys() == want["sums"].keys() and str(CULPRIT) not in got["sums"]
        if "bfloat16" not in layout:
            assert got["sums"] == pytest.approx(want["sums"], abs=1e-4)
        (line,) = got["said"]
        assert line.startswith("step 3: dropped a sequence that is not finite: prompt 1, response 1 (data-")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_stop_the_run_before_the_weights_move(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["many"]:
        assert rank["untouched"] and len(rank["said"]) == len(MANY)
        assert "4 of 9 sequences of one optimizer step are not finite" in rank["raised"]
        assert "loss.max_nonfinite_share allows 0.3. The weights are those before" in rank["raised"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_the_backward_pass_alone_names_the_packs(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["backward"]:
        assert rank["untouched"] and rank["said"] == []
        assert "the gradient is not finite, though every log-prob is. Look at pack " in rank["raised"]
        assert "prompt 1, response 1" in rank["raised"]
        # The packs of other mini-batches, and the others of this one, are not blamed.
        assert rank["raised"].count("Look at pack") == 1 and "prompt 3" not in rank["raised"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_old_pass_goes_on_without_the_response(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]["old pass"]:
        assert rank["found"] and rank["nonfinite"] == 1
        assert rank["said"] == [1, 1], "it is named once, in the old pass"
        assert rank["in packs"] == [n for n in range(27) if n != CULPRIT]
        # Old and new pass have the same packs.
        assert math.isfinite(rank["largest S"]) and rank["largest S"] == 0
