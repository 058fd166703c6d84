"""``verify`` can fail: each fault of faults.py is caught, and the first line says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FAULTS

from launch import found_by


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    worker = Path(__file__).with_name("faults_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("faults"), nproc=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_problem_names_the_fault(
    found: dict[str, dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    fault, problems = FAULTS[name], found[f"{name} {dtype}"]["problems"]
    if dtype not in fault.dtypes:
        assert problems == []
    else:
        assert problems and fault.caught in problems[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_there_is_no_problem(
    found: dict[str, dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    fault = FAULTS[name]
    result = found[f"without: {fault.layout} {fault.loss} {fault.split} {fault.tied} {dtype}"]
    assert result["problems"] == []
    assert result["error"] <= (1e-10 if dtype == torch.float64 else 1e-5)


def test_faults_are_caught_by_different_words() -> None:
    """Phrases that every failure has would prove nothing."""
    assert all(len(fault.caught) > 4 for fault in FAULTS.values())
    assert len({fault.caught for fault in FAULTS.values()}) > 0.6 * len(FAULTS)
