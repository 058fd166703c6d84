"""``verify`` can fail: each fault of faults.py is caught, and its cause is named first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FAULTS

from launch import found_by
from megatron_fspo.verify.compare import CAUSES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    worker = Path(__file__).with_name("faults_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("faults"), nproc=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_problem_names_the_fault_and_without_it_there_is_none(
    outcomes: dict[str, dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    fault, problems = FAULTS[name], outcomes[f"{name} {dtype}"]["problems"]
    if dtype not in fault.dtypes:
        assert problems == []
    else:
        assert problems[0].startswith(f"{fault.cause}: ") and fault.figures in problems[0]
    case = f"{fault.layout} {fault.loss} {fault.split} {fault.replay} {fault.share} {fault.tied}"
    sound = outcomes[f"without: {case} {dtype}"]
    assert sound["problems"] == []
    assert sound["error"] <= (1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.slow
def test_collectives_are_counted_where_a_group_has_several_ranks(outcomes: dict[str, dict[str, Any]]) -> None:
    """Not 0 because the functions that are counted have moved."""
    for name, result in outcomes.items():
        if name.startswith("without: "):
            layout = name.removeprefix("without: ").split(" ")[0]
            for group in ("tp", "cp"):
                assert (result["collectives"][group] > 0) == (f"{group}2" in layout), name


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_is_there(name: str) -> None:
    """In a second, where the ranks above need minutes and a missing name ends them all."""
    with FAULTS[name].patch():
        pass


def test_faults_have_different_causes() -> None:
    """A cause that every failure has would prove nothing."""
    causes = {fault.cause for fault in FAULTS.values()}
    assert causes <= CAUSES.keys() and len(causes) > 0.8 * len(CAUSES)
